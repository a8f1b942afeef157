"""The product of all ranks' rows with this rank's matrix.

=========  ===================  ===========================================================================
tensor     shape                what
=========  ===================  ===========================================================================
a          (..., K), M rows     of each rank its own rows, such as a part of the sequence
b          (K, N)               of each rank its own, such as a column-parallel weight; row-major or transposed
bias       (N,)                 this rank's own
out        (W M, N)             rows p M to (p + 1) M: rank p's a @ b + bias
gathered   (W M, K)             rows p M to (p + 1) M: rank p's a
=========  ===================  ===========================================================================

The rows of ``a`` are all its leading dimensions, flattened; M is the same on all ranks; so are N and the layout of ``b``, unless a
candidate is given. bfloat16, float16, float32 and float64, accumulated in float32 (float64 in float64). One candidate gives the
same bits each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops import fused, plain, rounds, torch_collectives
from crossfade.ops.arguments import check_operands, check_out, store
from crossfade.ops.backward import AllGather
from crossfade.ops.candidate import Candidate
from crossfade.ops.choice import way_of
from crossfade.ops.gradients import apply, wants_gradient
from crossfade.ops.job import Job, Way
from crossfade.ops.products import multiply_rows
from crossfade.ops.shape import Operator
from crossfade.ops.tracing import Traced, is_traced
from crossfade.peers.arguments import check_overlap

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["all_gather_matmul", "reference"]

_NAME = Operator.ALL_GATHER

_WAYS: Mapping[str, Way] = {
    "plain": plain.all_gather,
    "rounds": rounds.all_gather,
    "fused": fused.all_gather,
}


def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: PeerGroup,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
    lane: int = 0,
    candidate: Candidate | str | None = None,
    backward_candidate: Candidate | str | None = None,
    save_gathered: bool = True,
) -> torch.Tensor:
    """All ranks' ``a`` times this rank's ``b``, plus its ``bias``. Enqueues on torch's current stream; on a CPU it is done.

    All ranks call it in one order on a lane, with an ``a`` of one shape and type and equal candidates (this is not checked). Calls
    on different lanes may be in flight at the same time; candidates of torch.distributed use its group besides, in one order on
    all ranks.

    Args:
        a: (..., K).
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: the ranks.
        bias: (N,), or None.
        out: (W M, N), lies over no operand; None for a new one.
        gathered: (W M, K), contiguous, gets all ranks' ``a``, which may be this rank's part of it; None if nobody needs them. Lies
            not over ``out``. One of `PeerGroup.empty` is written by the other ranks themselves: all ranks give such a one, or none
            does.
        lane: which lane of the group.
        candidate: how; None for what was tuned for such a shape, or else for what the model finds best (docs/tuning.md).
        backward_candidate: how the gradient's reduce-scatter is done; None as above.
        save_gathered: keep all ranks' ``a`` for the gradient of ``b``: W times the memory of ``a``. Else they are gathered again.

    Raises:
        TypeError: something is no tensor, or of a type that the operator does not take, such as fp8.
        ValueError: devices, shapes, types or layouts do not fit, or there is no such candidate.
        RuntimeError: ``out`` or ``gathered`` is given, and a tensor requires grad.
        DeviceError: the group or its lanes do not allow the candidate.
        ChannelBroken: a rank has died.
        ChannelTimeout: without a candidate: rank 0 has not called it with such a shape.
    """
    if is_traced():
        traced = Traced(group, lane, candidate, backward_candidate)
        return traced.all_gather(a, b, bias, out, gathered, save_gathered=save_gathered)
    if wants_gradient(a, b, bias):
        call = AllGather(group, lane, candidate, backward_candidate, save_gathered=save_gathered)
        return apply(call, a, b, bias, out=out, gathered=gathered)
    operands = check_operands(_NAME, group, a, b, bias)
    num_rows = group.num_ranks * len(operands.a)
    target = check_out(_NAME, group, operands, out, (num_rows, b.shape[1]))
    if gathered is not None:
        place = -group.rank * operands.a.nbytes
        check_out(_NAME, group, operands, gathered, (num_rows, b.shape[0]), "gathered", place)
        if not gathered.is_contiguous():
            raise ValueError(f"gathered of {_NAME} is not contiguous\nhint: torch.empty({num_rows}, {b.shape[0]})")
        if out is not None:
            check_overlap(f"{_NAME} with gathered", gathered, out, None)
    way = way_of(_NAME, group, operands, num_rows, candidate, _WAYS, lane=lane)
    job = Job(_NAME, group, lane, operands.a, b, operands.bias, target, gathered, is_new_out=out is None)
    if operands.a.numel():
        way(job)
    elif num_rows:  # K is 0: there is nothing to gather, and the product is the bias
        multiply_rows(job, operands.a.new_empty(num_rows, 0), target)
    return store(group, out, target)


def reference(a: torch.Tensor, b: torch.Tensor, group: PeerGroup, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same by torch alone."""
    rows = a.reshape(-1, a.shape[-1])
    gathered = rows.new_empty(group.num_ranks * len(rows), rows.shape[1])
    torch_collectives.all_gather(group, gathered, rows.contiguous())
    product: torch.Tensor = torch_or_raise().mm(gathered, b)
    return product if bias is None else product + bias
