"""Everything that later calls of an operator need, done ahead: so that the next one is fast, or may be captured at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.calls.counts import Counts
from crossfade.ops.calls.job import Layout, Operator, Shape, layout_of, refuse_in_capture, takes_fused
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.choice.choose import WarmUp, choose_for
from crossfade.ops.operators import OPERATORS
from crossfade.ops.tuning import tuner_of
from crossfade.peers.groups import group_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from crossfade.peers.group import PeerGroup
    from crossfade.peers.groups import GroupLike


def prepare(
    operator: Callable[..., Any] | str,
    group: GroupLike = None,
    *,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype | str = "bfloat16",
    layout: str = Layout.COLUMNS,
    has_bias: bool = False,
    counts: Sequence[Sequence[int]] | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    is_measured: bool = False,
    has_gradient: bool = False,
) -> Candidate:
    """Prepares calls of one shape: see `prepare_call`, which is given operands instead. Collective.

    Args:
        operator: the function, or its name.
        group: the ranks, as for the operator; opened, if need be, for torch's current GPU, or else the CPU.
        m: rows of each rank's product, those of all ranks for an all-gather, as `crossfade tune` takes them. With ``counts`` any
            number will do.
        n: columns of the product.
        k: what is summed over.
        dtype: of the elements.
        layout: of ``b``; one of `Layout`.
        has_bias: calls have one.
        counts: of an all-to-all.
        lane: of the calls.
        candidate: of the calls.
        is_measured: see `prepare_call`.
        has_gradient: likewise.

    Returns:
        How calls of this shape without a candidate are done.

    Raises:
        ValueError: there is no such operator, type or layout, or W does not divide m.
        DeviceError: see `prepare_call`.
    """
    name, group = _operator(operator), group_of(group)
    refuse_in_capture(group, f"{name} is prepared")
    torch, num_ranks = torch_or_raise(), group.num_ranks
    shape = Shape(name, m, n, k, str(dtype).removeprefix("torch."), Layout(layout), num_ranks)
    if name is Operator.ALL_GATHER and m % num_ranks:
        raise ValueError(f"m of {name} is {m}\nhint: the rows of all {num_ranks} ranks, each of which has equally many")
    rows = shape.rows_of_a if counts is None else sum(counts[group.rank])
    zeros = partial(torch.zeros, dtype=getattr(torch, shape.dtype), device=group.device)
    a, b = zeros(rows, k), zeros(n, k).t() if layout == Layout.COLUMNS else zeros(k, n)
    more: dict[str, Any] = {} if counts is None else {"counts": counts}
    if has_bias:
        more["bias"] = zeros(n)
    more |= {"is_measured": is_measured, "has_gradient": has_gradient}
    return prepare_call(name, a, b, group, lane=lane, candidate=candidate, **more)


def prepare_call(
    operator: Callable[..., Any] | str,
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    *,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    is_measured: bool = False,
    has_gradient: bool = False,
    **options: Any,
) -> Candidate:
    """Does all that later calls with such operands need besides their work. Collective, and nothing else may be in flight.

    The algorithm is chosen; the call is done once, with its output, so that libraries load kernels, take workspaces and make
    communicators; and the device is waited for. A call like it may be captured next (on a group with ``is_replayable=True``).

    Args:
        operator: the function, or its name.
        a: as in the calls.
        b: likewise.
        group: likewise.
        lane: likewise; what one lane has is not another's.
        candidate: likewise.
        is_measured: without a candidate: measure the candidates first, as ``crossfade tune`` does, unless this was done before.
        has_gradient: the gradients of ``a``, ``b`` and ``bias`` are prepared too: they are computed once. They are not measured.
        options: what else the calls are given: ``bias``, ``out``, ``gathered``, ``counts``, ``backward_candidate``, ...

    Returns:
        How calls with such operands are done.

    Raises:
        DeviceError: the current stream is being captured.
        TypeError, ValueError, ChannelBroken, ChannelTimeout: as the operator.
    """
    name, group = _operator(operator), group_of(group, a)
    refuse_in_capture(group, f"{name} is prepared")
    chosen = _chosen(name, group, a, b, {**options, "lane": lane}, candidate, is_measured=is_measured)
    torch = torch_or_raise()
    function = OPERATORS[name].function
    with torch.no_grad():
        function(a, b, group, lane=lane, candidate=WarmUp(chosen), **options)
    if has_gradient:
        _go_back(function, a, b, group, {**options, "lane": lane, "candidate": chosen})
    if group.device_type == "cuda":
        torch.cuda.synchronize(group.device)
    group.check()
    return chosen


def _go_back(function: Callable[..., Any], a: Tensor, b: Tensor, group: PeerGroup, options: dict[str, Any]) -> None:
    """The gradients, once. What autograd cannot follow is left out: its calls have none."""
    options = {name: value for name, value in options.items() if name not in ("out", "gathered", "meanwhile")}
    if options.get("bias") is not None:
        options["bias"] = options["bias"].detach().requires_grad_()
    leaves = a.detach().requires_grad_(), b.detach().requires_grad_()
    with torch_or_raise().enable_grad():
        out = function(*leaves, group, **options)
        out.backward(torch_or_raise().zeros_like(out))


def _operator(operator: Callable[..., Any] | str) -> Operator:
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", repr(operator))
    if name not in set(Operator):
        raise ValueError(f"there is no operator {name!r}\nhint: one of {', '.join(Operator)}")
    return Operator(name)


def _chosen(
    name: Operator,
    group: PeerGroup,
    a: Tensor,
    b: Tensor,
    options: Mapping[str, Any],
    candidate: Candidate | str | None,
    *,
    is_measured: bool,
) -> Candidate:
    if candidate is not None:
        return Candidate.parse(candidate) if isinstance(candidate, str) else candidate
    counts: Sequence[Sequence[int]] | None = options.get("counts")
    num_rows, most_received = a.numel() // max(a.shape[-1], 1), 0
    if counts is not None:
        known = Counts(tuple(tuple(row) for row in counts), group.rank)
        num_rows, most_received = known.most_sent, known.most_received
    elif name is Operator.ALL_GATHER:
        num_rows *= group.num_ranks
    dtype = str(b.dtype).removeprefix("torch.")
    shape = Shape(name, num_rows, b.shape[1], b.shape[0], dtype, layout_of(name, b), group.num_ranks)
    if is_measured and shape.m and shape.n:
        tuner_of(group).tune(shape)
    can_fuse = takes_fused(name, options["lane"], has_bias=options.get("bias") is not None)
    return choose_for(shape, group, most_received, can_fuse=can_fuse)
