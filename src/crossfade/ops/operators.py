"""The operators: a matrix product and its collective, done together so that the product hides the collective; and a table of them.

W ranks, r this one; each rank has its own operands. The rows of ``a`` are all its leading dimensions, flattened: M of them.

=======================  =================  ======  ============================================================================
operator                 a                  b       out
=======================  =================  ======  ============================================================================
`matmul_reduce_scatter`  (..., K), M rows   (K, N)  (M / W, N): rows r M / W to (r + 1) M / W of the ranks' summed a @ b + bias
`matmul_all_reduce`      (..., K), M rows   (K, N)  (..., N): the ranks' summed a @ b + bias
`all_gather_matmul`      (..., K), M rows   (K, N)  (W M, N): rows p M to (p + 1) M are rank p's a times b, plus bias
`matmul_all_to_all`      (..., K), M rows   (K, N)  (R, N): first the rows of a @ b + bias from rank 0, then those from rank 1, ...
`replicated_matmul`      (..., K), of all   (K, N)  (..., N): a @ b + bias; its gradient is summed over the ranks
=======================  =================  ======  ============================================================================

``b`` is contiguous, or the transpose of a contiguous matrix. bfloat16, float16, float32 and float64, accumulated in float32
(float64 in float64); partial sums are rounded to the element type on their way. A bias is (N,); where products are summed it is
added once, and rank 0's counts. One candidate gives the same bits each time, and but for torch.distributed's also on all ranks.

Copy engines hide what is moved like this (the candidate ``rounds``, here with one round; ``plain`` does one after the other)::

    reduce-scatter  stream  mm r+1's rows | mm r+2's rows     | ... | mm own rows | wait for all parts | add them
                    copies                  r+1's part to it    r+2's part to it ...

    all-reduce      the same, and behind it all ranks fetch the sums, beside the products of the next round

    all-gather      stream  mm own rows   | mm r-1's rows, here by now | mm r-2's rows | ...
                    copies  own rows to r+1 | own rows to r+2 | ...

    all-to-all      stream  mm rows for r+1 | mm rows for r+2          | ... | mm own rows
                    copies                    fetch what r-1 computed    | fetch what r-2 computed | ...

`crossfade.ops.algorithms.overlaps` and `schedule` have them in full, with signals, several rounds and why their order is right. All
ranks call the operators of one lane in one order, with equal shapes (of an all-gather but for N), types, layouts and candidates;
this is not checked. Calls on different lanes may be in flight at the same time; candidates of torch.distributed use its group
besides, in one order on all ranks. A call enqueues on torch's current stream; on a CPU it is done when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

from crossfade.ops import forward, references
from crossfade.ops.calls.job import Operator, Shape
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.gradients.backward import AllGather, AllReduce, AllToAll, ReduceScatter, Replicated
from crossfade.ops.gradients.dispatch import apply, is_traced, trace, trace_all_to_all, trace_gather, wants_gradient
from crossfade.peers import collectives
from crossfade.peers.arguments import check_tensor, describe
from crossfade.peers.groups import group_of

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.groups import GroupLike


_P = ParamSpec("_P")


def _alone(operator: Callable[[], Tensor]) -> Tensor:
    return operator()


around = _alone
"""Calls an operator, where interleaved batches put it (`crossfade.batches.coroutines.interception`): they change behind it."""


def _stops(operator: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """A collective has started behind it."""

    @wraps(operator)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        if is_traced() or around is _alone:  # in this order: what is traced does not depend on the other
            return operator(*args, **kwargs)
        return around(partial(operator, *args, **kwargs))

    return call


@_stops
def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """A product summed over the ranks, each of which gets its block of the sum's rows.

    Args:
        a: (..., K), M rows; W divides M.
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: the ranks: a process group, opened by the first call, or what `crossfade.peers.open_group` gave; None for the default
            process group.
        bias: (N,); all ranks give one, or none does, and rank 0's counts.
        out: (M / W, N), lies over no operand; None for a new one.
        lane: which lane of the group.
        candidate: how; None for what was tuned for such a shape, or else for what the model finds best (docs/tuning.md).
        backward_candidate: how the gradient's all-gather is done; None as above.
        meanwhile: enqueues work of the caller's on the current stream, once, where that would else wait for the other ranks; it
            calls nothing on this lane. Not with tensors that require grad.

    Raises:
        TypeError: something is no tensor, or of a type that the operator does not take, such as fp8.
        ValueError: devices, shapes, types or layouts do not fit, W does not divide M, or there is no such candidate.
        RuntimeError: ``out`` or ``meanwhile`` is given, and a tensor requires grad.
        DeviceError: the group or its lanes do not allow the candidate.
        ChannelBroken: a rank has died.
        ChannelTimeout: without a candidate: rank 0 has not called it with such a shape.
    """
    if is_traced():
        where = group, lane, candidate, backward_candidate
        return trace("matmul_reduce_scatter", a, b, bias, where, out=out, meanwhile=meanwhile)
    group = group_of(group, a)
    if wants_gradient(a, b, bias):
        gradient = ReduceScatter(group, lane, candidate, backward_candidate)
        return apply(gradient, a, b, bias, out=out, meanwhile=meanwhile)
    return forward.reduce_scatter(a, b, group, bias=bias, out=out, lane=lane, candidate=candidate, meanwhile=meanwhile)


@_stops
def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """A product summed over the ranks, all of which get the sum.

    Args:
        a: (..., K).
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: as for `matmul_reduce_scatter`.
        bias: (N,); all ranks give one, or none does, and rank 0's counts.
        out: (..., N), lies over no operand; None for a new one. One of `PeerGroup.empty` is written by the other ranks
            themselves: all ranks give such a one, or none does.
        lane: which lane of the group.
        candidate: as for `matmul_reduce_scatter`.
        meanwhile: as for `matmul_reduce_scatter`.

    Raises:
        TypeError, ValueError, RuntimeError, DeviceError, ChannelBroken, ChannelTimeout: see `matmul_reduce_scatter`; any M will do.
    """
    if is_traced():
        return trace("matmul_all_reduce", a, b, bias, (group, lane, candidate, None), out=out, meanwhile=meanwhile)
    group = group_of(group, a)
    if wants_gradient(a, b, bias):
        return apply(AllReduce(group, lane, candidate), a, b, bias, out=out, meanwhile=meanwhile)
    return forward.all_reduce(a, b, group, bias=bias, out=out, lane=lane, candidate=candidate, meanwhile=meanwhile)


@_stops
def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    gathered: Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
    save_gathered: bool = True,
) -> Tensor:
    """The product of all ranks' rows with this rank's matrix.

    Args:
        a: (..., K), of one shape on all ranks.
        b: (K, N), contiguous or the transpose of a contiguous matrix; with a candidate, N may differ between ranks.
        group: as for `matmul_reduce_scatter`.
        bias: (N,), or None.
        out: (W M, N), lies over no operand; None for a new one.
        gathered: (W M, K), contiguous, gets all ranks' ``a``, which may be this rank's part of it; None if they are not needed.
            Lies not over ``out``. One of `PeerGroup.empty` is written by the other ranks themselves: all ranks give such a one, or
            none does.
        lane: which lane of the group.
        candidate: as for `matmul_reduce_scatter`.
        backward_candidate: how the gradient's reduce-scatter is done.
        save_gathered: keep all ranks' ``a`` for the gradient of ``b``: W times the memory of ``a``. Else they are gathered again.

    Raises:
        RuntimeError: ``out`` or ``gathered`` is given, and a tensor requires grad.
        TypeError, ValueError, DeviceError, ChannelBroken, ChannelTimeout: see `matmul_reduce_scatter`; any M will do.
    """
    if is_traced():
        where = group, lane, candidate, backward_candidate
        return trace_gather(a, b, bias, where, (out, gathered), save_gathered=save_gathered)
    group = group_of(group, a)
    if wants_gradient(a, b, bias):
        gradient = AllGather(group, lane, candidate, backward_candidate, save_gathered=save_gathered)
        return apply(gradient, a, b, bias, out=out, gathered=gathered)
    return forward.all_gather(a, b, group, bias=bias, out=out, gathered=gathered, lane=lane, candidate=candidate)


@_stops
def matmul_all_to_all(
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    counts: Sequence[Sequence[int]] | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
) -> Tensor:
    """A product whose rows go to other ranks, such as tokens from experts back to where they came from.

    Counts that the host knows may be uneven, and zero: ``counts[p][q]`` rows go from rank p to rank q, so M is the sum of row r and
    R the sum of column r. Where only the device knows them, `matmul_all_to_all_padded` moves rooms of one size.

    Args:
        a: (..., K): first the rows for rank 0, then those for rank 1, ...
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: as for `matmul_reduce_scatter`.
        counts: W rows of W (`gather_counts` asks the others for theirs); None for M / W rows to each.
        bias: (N,), or None.
        out: (R, N), lies over no operand; None for a new one.
        lane: which lane of the group.
        candidate: as for `matmul_reduce_scatter`.
        backward_candidate: how the gradient's all-to-all is done; None for the candidate of the forward product.

    Raises:
        ValueError: the counts do not fit; and as for the others.
        TypeError, RuntimeError, DeviceError, ChannelBroken, ChannelTimeout: see `matmul_reduce_scatter`.
    """
    if is_traced():
        flat = None if counts is None else [count for row in counts for count in row]
        where = group, lane, candidate, backward_candidate
        return trace("matmul_all_to_all", a, b, bias, where, flat, out=out)
    group = group_of(group, a)
    if wants_gradient(a, b, bias):
        return apply(AllToAll(group, lane, candidate, backward_candidate, counts=counts), a, b, bias, out=out)
    return forward.all_to_all(a, b, group, counts, bias=bias, out=out, lane=lane, candidate=candidate)


def matmul_all_to_all_padded(
    a: Tensor,
    b: Tensor,
    group: GroupLike,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
) -> tuple[Tensor, Tensor]:
    """`matmul_all_to_all` with counts that only the device knows: each rank has M / W rows of room in ``a`` and in ``out``.

    All rooms are computed and moved whole; of the room that comes from rank p, the first ``received[p]`` rows count.

    Args:
        a: (..., K); row p M / W is the first one for rank p.
        b: as for `matmul_all_to_all`, like all that is not named here.
        group: as for `matmul_reduce_scatter`.
        counts: (W,), of integers: how many rows of its room each rank is to get. The values are not looked at.
        bias: (N,), or None.
        out: (M, N), lies over no operand; None for a new one.
        lane: which lane of the group.
        candidate: how the product goes.
        backward_candidate: how its gradient goes.

    Returns:
        The rows, and ``received``: how many rows of each room count, (W,), of the type of ``counts``.

    Raises:
        TypeError, ValueError, DeviceError, ChannelBroken: see `matmul_all_to_all`.
    """
    options: dict[str, Any] = {"lane": lane, "candidate": candidate, "backward_candidate": backward_candidate}
    if is_traced():
        return matmul_all_to_all(a, b, group, bias=bias, out=out, **options), trace_all_to_all(group, counts, lane)
    name, group = Operator.ALL_TO_ALL, group_of(group, a)
    check_tensor(group, f"counts of {name}", counts)
    if counts.is_floating_point() or counts.is_complex() or tuple(counts.shape) != (group.num_ranks,):
        raise ValueError(f"counts of {name} is {describe(counts)}\nhint: integers of shape [{group.num_ranks}]")
    rows = matmul_all_to_all(a, b, group, bias=bias, out=out, **options)
    return rows, collectives.all_to_all(counts, group, lane=lane)


def replicated_matmul(
    a: Tensor,
    b: Tensor,
    group: GroupLike = None,
    *,
    bias: Tensor | None = None,
    lane: int = 0,
    backward_candidate: Candidate | str | None = None,
) -> Tensor:
    """A product of rows that all ranks have: nothing moves. The gradient of ``a`` is `matmul_all_reduce`, beside that of ``b``.

    Args:
        a: (..., K), the same on all ranks.
        b: (K, N), contiguous or the transpose of a contiguous matrix; of each rank its own, such as a column-parallel weight.
        group: as for `matmul_reduce_scatter`.
        bias: (N,), this rank's own, or None.
        lane: which lane of the group the gradient's all-reduce takes.
        backward_candidate: how that is done; None for what was tuned for such a shape, or else for what the model finds best.

    Raises:
        TypeError, ValueError: see `matmul_reduce_scatter`.
    """
    if is_traced():
        return trace("replicated_matmul", a, b, bias, (group, lane, None, backward_candidate))
    group = group_of(group, a)
    if wants_gradient(a, b, bias):
        return apply(Replicated(group, lane, None, backward_candidate), a, b, bias)
    return forward.replicated(a, b, group, bias=bias)


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """What belongs to an operator."""

    function: Callable[..., Tensor]  # the public one
    forward: Callable[..., Tensor]  # the same without a gradient
    reference: Callable[..., Tensor]  # the same by torch alone
    out_shape: Callable[[Shape], tuple[int, int]]  # of this rank's output, for a shape with equal counts


def _all_rows(shape: Shape) -> tuple[int, int]:
    return shape.m, shape.n


def _own_rows(shape: Shape) -> tuple[int, int]:
    return shape.m // shape.num_ranks, shape.n


OPERATORS: Mapping[Operator, OperatorSpec] = {
    Operator.REDUCE_SCATTER: OperatorSpec(
        matmul_reduce_scatter, forward.reduce_scatter, references.matmul_reduce_scatter, _own_rows
    ),
    Operator.ALL_REDUCE: OperatorSpec(matmul_all_reduce, forward.all_reduce, references.matmul_all_reduce, _all_rows),
    Operator.ALL_GATHER: OperatorSpec(all_gather_matmul, forward.all_gather, references.all_gather_matmul, _all_rows),
    Operator.ALL_TO_ALL: OperatorSpec(matmul_all_to_all, forward.all_to_all, references.matmul_all_to_all, _all_rows),
}
"""The operators for which a candidate is chosen."""
