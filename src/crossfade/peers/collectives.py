"""The collectives, on tensors. Each enqueues on torch's current stream and returns; on a CPU it is done when it returns.

W ranks. Every function takes a `PeerGroup`, gives the output, and takes ``out`` to write into. All ranks call the functions of
one lane in one order, with equal shapes and types (this is not checked: it would cost more than the collective). Calls on
different lanes may be in flight at the same time; where streams share hardware queues, they too must be enqueued in one order on
all ranks.

===============  ================  ====================
function         input             output
===============  ================  ====================
all_gather       (n, ...)          (W * n, ...)
all_to_all       (W * n, ...)      (W * n, ...)
reduce_scatter   (W * n, ...)      (n, ...)
all_reduce       (...)             (...)
===============  ================  ====================

An ``out`` of `PeerGroup.empty` is written by the other ranks themselves, so that an all-gather or all-to-all moves each byte once.
All ranks give such an ``out``, or none does.

A sum is added up in the order of the ranks, so all ranks get the same bits, each time; float16 and bfloat16 are added in float32
and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from crossfade.device.tensors import torch_or_raise
from crossfade.peers import steps
from crossfade.peers.group import PeerGroup
from crossfade.peers.home import Kind
from crossfade.peers.lane import Lane
from crossfade.peers.tuning import DEFAULT, Tuning

if TYPE_CHECKING:
    import torch

__all__ = ["SUMMABLE", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]

SUMMABLE = ("bfloat16", "float16", "float32", "float64", "int32", "int64")
"""Element types that can be summed; all types can be moved."""


def all_gather(
    group: PeerGroup,
    tensor: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lane: int = 0,
    tuning: Tuning = DEFAULT,
) -> torch.Tensor:
    """All ranks' tensors, one behind the other along the first dimension. The input may be this rank's part of ``out``."""
    _check(group, "the input of all_gather", tensor)
    shape = (group.num_ranks * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (group.num_ranks,)

    def enqueue(chosen: Lane, stream: int, target: torch.Tensor, source: torch.Tensor) -> None:
        size_bytes = source.numel() * source.itemsize
        offset = group.shared_offset(target)
        steps.all_gather(chosen, stream, target.data_ptr(), source.data_ptr(), size_bytes, tuning, offset)

    place = -group.rank * tensor.numel() * tensor.itemsize
    return _call(group, "all_gather", tensor, out, shape, lane, tuning, enqueue, place)


def all_to_all(
    group: PeerGroup,
    tensor: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lane: int = 0,
    tuning: Tuning = DEFAULT,
) -> torch.Tensor:
    """Part p of the first dimension goes to rank p; the parts that arrive are one behind the other, by rank."""
    _check(group, "the input of all_to_all", tensor)
    _part(group, "all_to_all", tensor)

    def enqueue(chosen: Lane, stream: int, target: torch.Tensor, source: torch.Tensor) -> None:
        size_bytes = source.numel() * source.itemsize // group.num_ranks
        offset = group.shared_offset(target)
        steps.all_to_all(chosen, stream, target.data_ptr(), source.data_ptr(), size_bytes, tuning, offset)

    return _call(group, "all_to_all", tensor, out, tuple(tensor.shape), lane, tuning, enqueue, None)


def reduce_scatter(
    group: PeerGroup,
    tensor: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lane: int = 0,
    tuning: Tuning = DEFAULT,
) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum of all ranks' tensors. ``out`` may be that part of the input."""
    _check(group, "the input of reduce_scatter", tensor)
    kind = _kind("reduce_scatter", tensor)
    shape = (_part(group, "reduce_scatter", tensor), *tensor.shape[1:])

    def enqueue(chosen: Lane, stream: int, target: torch.Tensor, source: torch.Tensor) -> None:
        steps.reduce_scatter(chosen, stream, target.data_ptr(), source.data_ptr(), target.numel(), kind, tuning)

    place = group.rank * (tensor.numel() // group.num_ranks) * tensor.itemsize
    return _call(group, "reduce_scatter", tensor, out, shape, lane, tuning, enqueue, place)


def all_reduce(
    group: PeerGroup,
    tensor: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lane: int = 0,
    tuning: Tuning = DEFAULT,
) -> torch.Tensor:
    """The sum of all ranks' tensors. ``out`` may be the input."""
    _check(group, "the input of all_reduce", tensor)
    kind = _kind("all_reduce", tensor)

    def enqueue(chosen: Lane, stream: int, target: torch.Tensor, source: torch.Tensor) -> None:
        steps.all_reduce(chosen, stream, target.data_ptr(), source.data_ptr(), target.numel(), kind, tuning)

    return _call(group, "all_reduce", tensor, out, tuple(tensor.shape), lane, tuning, enqueue, 0)


def _call(
    group: PeerGroup,
    name: str,
    tensor: torch.Tensor,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    lane: int,
    tuning: Tuning,
    enqueue: Callable[[Lane, int, torch.Tensor, torch.Tensor], None],
    place: int | None,
) -> torch.Tensor:
    """Checks ``out``, packs what is not contiguous, enqueues, unpacks. ``place``: where out may lie, seen from the input."""
    torch = torch_or_raise()
    if out is None:
        out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    else:
        _check(group, f"out of {name}", out)
        if tuple(out.shape) != shape or out.dtype != tensor.dtype:
            raise ValueError(
                f"out of {name} is {_describe(out)}\nhint: it has to be {tensor.dtype} of shape {list(shape)}"
            )
        _check_overlap(name, tensor, out, place)
    chosen, stream, is_captured = group.lane(lane), group.current_stream(), group.is_capturing()
    chosen.begin(stream, num_streams=tuning.num_streams, is_captured=is_captured)
    source = _pack(group, tensor)
    target = out if out.is_contiguous() else torch.empty(shape, dtype=out.dtype, device=out.device)
    try:
        enqueue(chosen, stream, target, source)
        steps.end(chosen, stream)
    except BaseException as error:
        chosen.cut_off(error)
        raise
    _keep(group, source, target)
    if target is not out:
        _unpack(group, out, target)
    group.check_call(chosen)
    return out


def _pack(group: PeerGroup, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    packed = torch_or_raise().empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    _unpack(group, packed, tensor)
    return packed  # type: ignore[no-any-return]


def _unpack(group: PeerGroup, target: torch.Tensor, source: torch.Tensor) -> None:
    """A copy by torch's kernel, in its place among what the current stream does."""
    group.do(lambda: target.copy_(source))


def _keep(group: PeerGroup, *tensors: torch.Tensor) -> None:
    """What a captured call on a CPU touches lives as long as its graph, in an action that does nothing.

    (On a GPU torch's own allocator sees to it.)
    """
    group.do(lambda: tensors and None)


def _check(group: PeerGroup, what: str, tensor: torch.Tensor) -> None:
    torch = torch_or_raise()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}\nhint: give a torch tensor")
    index = group.home.driver.device
    if tensor.device.type != group.device_type or (group.device_type == "cuda" and tensor.device.index != index):
        own = "cpu" if group.device_type == "cpu" else f"cuda:{index}"
        raise ValueError(f"{what} is on {tensor.device}, and the group's device is {own}\nhint: tensor.to('{own}')")
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} is not a plain strided tensor\nhint: to_dense(), resolve_conj() or resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{what} requires grad, and collectives have no gradient\nhint: detach() it")


def _check_overlap(name: str, tensor: torch.Tensor, out: torch.Tensor, place: int | None) -> None:
    """What is packed first may overlap; else one block would be written over another that is still to be read."""
    if not (tensor.is_contiguous() and out.is_contiguous()):
        return
    distance = out.data_ptr() - tensor.data_ptr()
    is_apart = distance >= tensor.numel() * tensor.itemsize or -distance >= out.numel() * out.itemsize
    if not is_apart and distance != place:
        what = "cannot write into its input" if place is None else "can only write into its input in place"
        raise ValueError(f"{name} {what}\nhint: give another tensor as out, or none")


def _kind(name: str, tensor: torch.Tensor) -> Kind:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in SUMMABLE:
        raise TypeError(f"{name} cannot sum tensors of {tensor.dtype}\nhint: one of {', '.join(SUMMABLE)}")
    return Kind(dtype, tensor.itemsize)


def _part(group: PeerGroup, name: str, tensor: torch.Tensor) -> int:
    """The length of one rank's part of the first dimension."""
    length = tensor.shape[0] if tensor.dim() else 0
    if not tensor.dim() or length % group.num_ranks:
        raise ValueError(
            f"the input of {name} is {_describe(tensor)}\nhint: its first dimension has to be a multiple of the number of ranks, "
            f"{group.num_ranks}"
        )
    return length // group.num_ranks


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"
