"""A product whose rows go to other ranks, such as tokens from experts back to where they came from.

=======  ===================  =============================================================================
tensor   shape                what
=======  ===================  =============================================================================
a        (..., K), M rows     first the rows for rank 0, then those for rank 1, ...
b        (K, N)               of each rank its own, such as an expert's weight; row-major or transposed
bias     (N,)                 this rank's own, added to what it sends
out      (R, N)               first the rows of a @ b + bias from rank 0, then those from rank 1, ...
=======  ===================  =============================================================================

Counts that the host knows may be uneven, and zero: ``counts[p][q]`` rows go from rank p to rank q, so M is the sum of row r and R
the sum of column r. Where only the device knows them, `matmul_all_to_all_padded` moves rooms of one size. bfloat16, float16,
float32 and float64, accumulated in float32 (float64 in float64). One candidate gives the same bits each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops import plain, rounds, torch_collectives
from crossfade.ops.arguments import check_operands, check_out, rows_for_each, store
from crossfade.ops.backward import AllToAll
from crossfade.ops.candidate import Candidate
from crossfade.ops.choice import way_of
from crossfade.ops.counts import Counts
from crossfade.ops.gradients import apply, wants_gradient
from crossfade.ops.job import Job, Way
from crossfade.ops.shape import Operator
from crossfade.ops.tracing import Traced, is_traced, trace_all_to_all
from crossfade.peers import collectives
from crossfade.peers.arguments import check_tensor, describe

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["matmul_all_to_all", "matmul_all_to_all_padded", "reference"]

_NAME = Operator.ALL_TO_ALL

_WAYS: Mapping[str, Way] = {
    "plain": plain.all_to_all,
    "rounds": rounds.all_to_all,
}


def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    group: PeerGroup,
    counts: Sequence[Sequence[int]] | None = None,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
) -> torch.Tensor:
    """Rows of ``a @ b + bias`` from all ranks. Enqueues on torch's current stream; on a CPU it is done.

    All ranks call it in one order on a lane, with equal counts, N, K, types, layouts and candidates (this is not checked). Calls
    on different lanes may be in flight at the same time; candidates of torch.distributed use its group besides, in one order on all
    ranks.

    Args:
        a: (..., K).
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: the ranks.
        counts: W rows of W: how many rows go from each rank to each (`crossfade.ops.counts.gather_counts` asks the others);
            None for M / W to each.
        bias: (N,), or None.
        out: (R, N), lies over no operand; None for a new one.
        lane: which lane of the group.
        candidate: how; None for what was tuned for such a shape, or else for what the model finds best (docs/tuning.md).
        backward_candidate: how the gradient's all-to-all is done; None for the way of the forward product.

    Raises:
        TypeError: something is no tensor, or of a type that the operator does not take, such as fp8.
        ValueError: devices, shapes, types, layouts or counts do not fit, or there is no such candidate.
        RuntimeError: ``out`` is given, and a tensor requires grad.
        DeviceError: the group or its lanes do not allow the candidate.
        ChannelBroken: a rank has died.
        ChannelTimeout: without a candidate: rank 0 has not called it with such a shape.
    """
    if is_traced():
        return Traced(group, lane, candidate, backward_candidate).all_to_all(a, b, bias, out, counts)
    if wants_gradient(a, b, bias):
        return apply(AllToAll(group, lane, candidate, backward_candidate, counts=counts), a, b, bias, out=out)
    operands = check_operands(_NAME, group, a, b, bias)
    known = _counts(group, len(operands.a), counts)
    target = check_out(_NAME, group, operands, out, (sum(known.received), b.shape[1]))
    way = way_of(_NAME, group, operands, known.most_sent, candidate, _WAYS, most_received=known.most_received)
    if known.largest and b.shape[1]:
        way(Job(_NAME, group, lane, operands.a, b, operands.bias, target, counts=known))
    return store(group, out, target)


def matmul_all_to_all_padded(
    a: torch.Tensor,
    b: torch.Tensor,
    group: PeerGroup,
    counts: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`matmul_all_to_all` with counts that only the device knows: each rank has M / W rows of room in ``a`` and in ``out``.

    All rooms are computed and moved whole; of the room that comes from rank p, the first ``received[p]`` rows count.

    Args:
        a: (..., K); row p M / W is the first one for rank p.
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: the ranks.
        counts: (W,), of integers: how many rows of its room each rank is to get. Nobody looks at the values.
        bias: (N,), or None.
        out: (M, N), lies over no operand; None for a new one.
        lane: which lane of the group.
        candidate: how; None for what was tuned for such a shape, or else for what the model finds best (docs/tuning.md).
        backward_candidate: how the gradient's all-to-all is done; None for the way of the forward product.

    Returns:
        The rows, and how many of each room count: (W,), of the type of ``counts``.

    Raises:
        TypeError, ValueError, DeviceError, ChannelBroken: see `matmul_all_to_all`.
    """
    if is_traced():
        traced = Traced(group, lane, candidate, backward_candidate)
        return traced.all_to_all(a, b, bias, out, None), trace_all_to_all(group, counts, lane)
    check_tensor(group, f"counts of {_NAME}", counts)
    if counts.is_floating_point() or counts.is_complex() or tuple(counts.shape) != (group.num_ranks,):
        raise ValueError(f"counts of {_NAME} is {describe(counts)}\nhint: integers of shape [{group.num_ranks}]")
    rows = matmul_all_to_all(
        a, b, group, bias=bias, out=out, lane=lane, candidate=candidate, backward_candidate=backward_candidate
    )
    return rows, collectives.all_to_all(group, counts, lane=lane)


def _counts(group: PeerGroup, num_rows: int, given: Sequence[Sequence[int]] | None) -> Counts:
    num_ranks = group.num_ranks
    if given is None:
        return Counts.even(rows_for_each(_NAME, group, num_rows), group.rank, num_ranks)
    rows = tuple(tuple(int(count) for count in row) for row in given)
    if len(rows) != num_ranks or any(len(row) != num_ranks or min(row) < 0 for row in rows):
        raise ValueError(
            f"counts of {_NAME} are {[list(row) for row in rows]}\n"
            f"hint: {num_ranks} rows of {num_ranks} counts that are not negative"
        )
    if sum(rows[group.rank]) != num_rows:
        raise ValueError(
            f"a of {_NAME} has {num_rows} rows, and counts[{group.rank}] are {sum(rows[group.rank])} in all\n"
            "hint: counts[p][q] rows go from rank p to rank q"
        )
    return Counts(rows, group.rank)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    group: PeerGroup,
    counts: Sequence[Sequence[int]] | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch alone."""
    product: torch.Tensor = torch_or_raise().mm(a.reshape(-1, a.shape[-1]), b)
    if bias is not None:
        product = product + bias
    known = _counts(group, len(product), counts)
    out = product.new_empty(sum(known.received), product.shape[1])
    torch_collectives.all_to_all(group, out, product, known.received, known.sent)
    return out
