"""A product whose rows are told of, group by group, while the rest is computed: for communication of the caller's own.

=====  ===================  =====================================================
tensor shape                what
=====  ===================  =====================================================
a      (..., K), M rows     row-major
b      (K, N)               row-major, or the transpose of a row-major matrix
bias   (N,)                 added once
out    (..., N)             a @ b + bias
=====  ===================  =====================================================

::

    caller's stream          product: group 0 | group 1 | group 2 | ...                      | waits for the last on_group
    communication stream        wait for group 0 | on_group(0)'s | wait for group 1 | on_group(1)'s | ...

On a GPU the product is one kernel that counts its tiles, and the communication stream waits for the counts; so no work is cut, and
the callback's work need not take turns with launches of products. Where that kernel is not to be had (no Triton, float32, rows that
are no multiple of 16 bytes) there is one product for each group, and on a CPU each callback comes behind its group's product.
Groups are the same in all cases, so ranks need not be alike.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.calls.job import DTYPES, layout_of
from crossfade.ops.calls.products import multiply
from crossfade.ops.signaled.operands import KIND_NAMES, Operands, has_descriptors
from crossfade.ops.signaled.sides import OnGroup, RowGroup, side_of
from crossfade.ops.signaled.tiles import TileConfig, TilePlan, plan_tiles
from crossfade.peers.arguments import check_overlap, describe

if TYPE_CHECKING:
    from torch import Tensor

_NAME = "matmul_signaled"
_NUM_GROUPS = 8
_LEAST_TILES = 128
"""Of a group, where the caller does not say how many rows it has: about as many as are computed at a time."""


def matmul_signaled(
    a: Tensor,
    b: Tensor,
    *,
    on_group: OnGroup,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    group_rows: int | None = None,
    reserve_sms: int = 0,
    lane: int = 0,
) -> Tensor:
    """``a @ b + bias`` on torch's current stream, with a callback for each group of its rows.

    ``on_group`` is called on the host, in the order of the rows, once for each group, with torch's current stream set to a
    communication stream that waits until the group is done; it enqueues what is to happen then, and does not wait for the device.
    Behind `matmul_signaled`, the caller's stream waits for all that was enqueued. It may be captured once it was called like that,
    or prepared. On a CPU the group is done when the callback is called, and what that does is done when it returns.

    Calls on one lane come one behind the other, on whatever streams, by one thread at a time; graphs that hold calls of one lane
    are not replayed at the same time. Lanes have nothing to do with each other.

    Args:
        a: (..., K).
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        on_group: the callback. What it raises is raised here, and no further group is told of.
        bias: (N,), or None.
        out: (..., N), contiguous, lies over no operand; None for a new one.
        group_rows: about how many rows a group has, in steps of 128; None for about 8 groups that are not too small.
        reserve_sms: GPUs only: SMs that are left to kernels of the callback. Copies need none; NCCL's kernels need as many as they
            have blocks (``max_ctas``), in no clusters (``cga_cluster_size`` 0), or they begin when the product has ended.
        lane: any number.

    Raises:
        TypeError: something is no tensor, or of a type that is not taken.
        ValueError: devices, shapes, types or layouts do not fit, or a tensor requires grad.
        DeviceError: it is captured, and not prepared.
    """
    rows, target = _check(a, b, bias, out)
    plan = _plan(len(rows), b.shape[1], group_rows)
    packed = None if bias is None else bias.contiguous()  # the kernel has its address alone
    given = _Given(rows, b, packed, target.view(len(rows), b.shape[1]))
    if not target.is_cuda:
        _by_products(given, plan, on_group)
        return target
    index = target.device.index
    with torch_or_raise().cuda.device(index):
        if _has_kernel(given):
            from crossfade.ops.signaled.signaling import products_of

            products_of(index).run(*given, plan, on_group, reserve_sms=reserve_sms, lane=lane)
        else:
            _by_products(given, plan, on_group, side_of(index, lane))
    return target


def prepare_signaled(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    group_rows: int | None = None,
    reserve_sms: int = 0,
    lane: int = 0,
) -> None:
    """Does all that calls with such arguments need besides their work, so that the first one may be captured.

    ``out`` is overwritten. The device is waited for; no stream may wait for another rank meanwhile.

    Args:
        a: as in the calls.
        b: likewise.
        bias: likewise.
        out: likewise.
        group_rows: likewise.
        reserve_sms: likewise.
        lane: likewise.

    Raises:
        TypeError, ValueError: see `matmul_signaled`.
        DeviceError: the current stream is being captured.
    """
    options: dict[str, Any] = {"group_rows": group_rows, "reserve_sms": reserve_sms, "lane": lane}
    given = matmul_signaled(a, b, on_group=_nothing, bias=bias, out=out, **options)
    if given.is_cuda:
        torch_or_raise().cuda.synchronize(given.device)


def reference(a: Tensor, b: Tensor, *, on_group: OnGroup, bias: Tensor | None = None) -> Tensor:
    """The same by torch alone, in one group."""
    product: Tensor = torch_or_raise().mm(a.reshape(-1, a.shape[-1]), b)
    if bias is not None:
        product = product + bias
    stream = torch_or_raise().cuda.current_stream(a.device) if a.is_cuda else None
    on_group(RowGroup(0, slice(0, len(product)), product, stream))
    return product.view(*a.shape[:-1], b.shape[1])


class _Given(NamedTuple):
    """Checked operands: (M, K), (K, N), (N,) and (M, N)."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    out: Tensor


def _nothing(group: RowGroup) -> None: ...


def _by_products(given: _Given, plan: TilePlan, on_group: OnGroup, side: Any = None) -> None:
    """A product for each group. A callback's work is enqueued behind its product, and in front of the next one."""
    a, b, bias, out = given
    main = side.begin() if side is not None else None
    try:
        for piece in plan.pieces:
            rows = slice(piece.begin, piece.end)
            multiply(a[rows], b, out[rows], bias)
            if side is None:
                on_group(RowGroup(piece.counter, rows, out[rows], None))
                continue
            side.fork(main)
            with side.use():
                on_group(RowGroup(piece.counter, rows, out[rows], side.stream))
    finally:
        if side is not None:
            side.join(main)


@lru_cache(256)
def _plan(num_rows: int, num_columns: int, group_rows: int | None) -> TilePlan:
    """How the rows are cut, the same with kernels and without."""
    config, columns = TileConfig(), max(num_columns, 1)
    num_rows = num_rows if num_columns else 0
    if group_rows is None:
        across = -(-columns // config.num_columns)
        least = config.num_rows * -(-_LEAST_TILES // across)
        group_rows = max(-(-num_rows // _NUM_GROUPS), least)
    return plan_tiles(num_rows, columns, piece_rows=group_rows)


def _has_kernel(given: _Given) -> bool:
    """Whether there is a kernel that signals, and it is worth something."""
    a, b, _, out = given
    if not (out.numel() and a.shape[1]) or str(a.dtype).removeprefix("torch.") not in KIND_NAMES:
        return False
    return _has_triton() and Operands.of(a, b, has_descriptors=has_descriptors(a.device.index)).is_by_descriptor


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None and find_spec("cuda") is not None


def _check(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of ``a``, and the output."""
    named = {"a": a, "b": b} | ({} if bias is None else {"bias": bias}) | ({} if out is None else {"out": out})
    for what, tensor in named.items():
        _check_tensor(what, tensor)
    if str(a.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"{_NAME} takes no {a.dtype}\nhint: one of {', '.join(DTYPES)}")
    for what, tensor in named.items():
        if (tensor.device, tensor.dtype) != (a.device, a.dtype):
            here, there = f"{a.dtype} on {a.device}", f"{tensor.dtype} on {tensor.device}"
            raise ValueError(f"a of {_NAME} is {here}, and {what} is {there}\nhint: give all of one type and device")
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        shapes = f"a of {_NAME} is of shape {list(a.shape)} and b of {list(b.shape)}"
        raise ValueError(f"{shapes}\nhint: they have to be (..., K) and (K, N)")
    layout_of(_NAME, b)
    shape = (*a.shape[:-1], b.shape[1])
    if bias is not None and tuple(bias.shape) != (b.shape[1],):
        raise ValueError(f"bias of {_NAME} is {describe(bias)}\nhint: it has to be of shape [{b.shape[1]}]")
    if out is not None and (tuple(out.shape) != shape or not out.is_contiguous()):
        raise ValueError(f"out of {_NAME} is {describe(out)}\nhint: contiguous, of shape {list(shape)}")
    target = a.new_empty(shape) if out is None else out
    for each in (a, b, bias):
        if each is not None and out is not None:
            check_overlap(_NAME, each if each.is_contiguous() else each.t() if each is b else each, out, None)
    return a.contiguous().flatten(0, -2), target


def _check_tensor(what: str, tensor: Any) -> None:
    torch = torch_or_raise()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} of {_NAME} is a {type(tensor).__name__}\nhint: give a torch tensor")
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
        where = f"{tensor.device}, {tensor.layout}"
        raise ValueError(f"{what} of {_NAME} is on {where}\nhint: a strided tensor on a CPU or a CUDA device")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{what} of {_NAME} requires grad, and it has no gradient\nhint: detach() it")
