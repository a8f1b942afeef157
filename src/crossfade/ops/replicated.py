"""A product of rows that all ranks have, whose gradient is summed over the ranks.

=======  ===================  =============================================================================
tensor   shape                what
=======  ===================  =============================================================================
a        (..., K)             the same on all ranks, such as activations
b        (K, N)               of each rank its own, such as a column-parallel weight; row-major or transposed
bias     (N,)                 this rank's own
out      (..., N)             a @ b + bias
=======  ===================  =============================================================================

Nothing moves forward. Backward the gradient of ``a`` is `matmul_all_reduce`, beside which that of ``b`` is computed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.arguments import check_operands
from crossfade.ops.backward import Replicated
from crossfade.ops.candidate import Candidate
from crossfade.ops.gradients import apply, wants_gradient
from crossfade.ops.products import multiply
from crossfade.ops.tracing import Traced, is_traced

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["reference", "replicated_matmul"]


def replicated_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: PeerGroup,
    *,
    bias: torch.Tensor | None = None,
    lane: int = 0,
    backward_candidate: Candidate | str | None = None,
) -> torch.Tensor:
    """``a @ b + bias``. Enqueues on torch's current stream; on a CPU it is done.

    Args:
        a: (..., K), the same on all ranks.
        b: (K, N), contiguous or the transpose of a contiguous matrix.
        group: the ranks.
        bias: (N,), or None.
        lane: which lane of the group the gradient's all-reduce takes.
        backward_candidate: how that is done; None for what was tuned for such a shape, or else for what the model finds best.

    Raises:
        TypeError: something is no tensor, or of a type that operators do not take.
        ValueError: devices, shapes, types or layouts do not fit.
    """
    if is_traced():
        return Traced(group, lane, None, backward_candidate).call("replicated_matmul", a, b, bias)
    if wants_gradient(a, b, bias):
        return apply(Replicated(group, lane, None, backward_candidate), a, b, bias)
    rows, matrix, added = check_operands("replicated_matmul", group, a, b, bias)
    out = a.new_empty(*a.shape[:-1], b.shape[1])
    group.do(partial(multiply, rows, matrix, out.view(len(rows), b.shape[1]), added))
    return out


def reference(a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same by torch alone, without the sum over ranks in the gradient."""
    product: torch.Tensor = torch_or_raise().matmul(a, b)
    return product if bias is None else product + bias
