"""A product summed over the ranks, each of which gets its block of the sum's rows.

=======  ===================  =============================================================================
tensor   shape                what
=======  ===================  =============================================================================
a        (..., K), M rows     of each rank its own: its part of the inner dimension, such as activations
b        (K, N)               of each rank its own, such as a row-parallel weight; row-major or transposed
bias     (N,)                 added once; rank 0's counts
out      (M / W, N)           rank r: rows r M / W to (r + 1) M / W of the sum over ranks of a @ b + bias
=======  ===================  =============================================================================

The rows of ``a`` are all its leading dimensions, flattened. bfloat16, float16, float32 and float64; products are accumulated in
float32 (float64 in float64), partial sums are rounded to the element type on their way. One candidate gives the same bits each
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops import fused, plain, rounds, tiled, torch_collectives
from crossfade.ops.arguments import check_operands, check_out, rows_for_each, store
from crossfade.ops.backward import ReduceScatter
from crossfade.ops.candidate import Candidate
from crossfade.ops.choice import way_of
from crossfade.ops.gradients import apply, wants_gradient
from crossfade.ops.job import Job, Once, Way
from crossfade.ops.shape import Operator
from crossfade.ops.tracing import Traced, is_traced

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["matmul_reduce_scatter", "reference"]

_NAME = Operator.REDUCE_SCATTER

_WAYS: Mapping[str, Way] = {
    "plain": plain.reduce_scatter,
    "rounds": rounds.reduce_scatter,
    "tiles": tiled.reduce_scatter,
    "fused": fused.reduce_scatter,
}


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    group: PeerGroup,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> torch.Tensor:
    """This rank's block of the sum over ranks of ``a @ b + bias``. Enqueues on torch's current stream; on a CPU it is done.

    All ranks call it in one order on a lane, with equal shapes, types, layouts and candidates (this is not checked). Calls on
    different lanes may be in flight at the same time; candidates of torch.distributed use its group besides, in one order on all
    ranks.

    Args:
        a: (..., K).
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: the ranks.
        bias: (N,), added once; all ranks give one, or none does, and rank 0's counts.
        out: (M / W, N), lies over no operand; None for a new one.
        lane: which lane of the group.
        candidate: how; None for what was tuned for such a shape, or else for what the model finds best (docs/tuning.md).
        backward_candidate: how the gradient's all-gather is done; None as above.
        meanwhile: enqueues work of the caller's on the current stream, once, where that would else wait for the other ranks; it
            calls nothing on this lane. Not with tensors that require grad.

    Raises:
        TypeError: something is no tensor, or of a type that the operator does not take, such as fp8.
        ValueError: devices, shapes, types or layouts do not fit, W does not divide M, or there is no such candidate.
        RuntimeError: ``out`` is given, and a tensor requires grad.
        DeviceError: the group or its lanes do not allow the candidate.
        ChannelBroken: a rank has died.
        ChannelTimeout: without a candidate: rank 0 has not called it with such a shape.
    """
    if is_traced():
        return Traced(group, lane, candidate, backward_candidate).call(str(_NAME), a, b, bias, out, meanwhile)
    if wants_gradient(a, b, bias):
        return apply(
            ReduceScatter(group, lane, candidate, backward_candidate), a, b, bias, out=out, meanwhile=meanwhile
        )
    fill = Once(meanwhile, group.is_capturing)
    operands = check_operands(_NAME, group, a, b, bias)
    block = rows_for_each(_NAME, group, len(operands.a))
    target = check_out(_NAME, group, operands, out, (block, b.shape[1]))
    way = way_of(_NAME, group, operands, len(operands.a), candidate, _WAYS, lane=lane)
    if target.numel():
        own = operands.bias if group.rank == 0 else None
        has_bias, is_new_out = bias is not None, out is None
        way(Job(_NAME, group, lane, operands.a, b, own, target, has_bias=has_bias, is_new_out=is_new_out, fill=fill))
    fill()
    return store(group, out, target)


def reference(a: torch.Tensor, b: torch.Tensor, group: PeerGroup, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same by torch alone."""
    product: torch.Tensor = torch_or_raise().mm(a.reshape(-1, a.shape[-1]), b)
    if bias is not None and group.rank == 0:
        product = product + bias
    out = product.new_empty(len(product) // group.num_ranks, product.shape[1])
    torch_collectives.reduce_scatter(group, out, product)
    return out
