"""All ranks' rows for this one, times this rank's matrix: the way back of `matmul_all_to_all`, which its gradient takes.

=========  ===================  ===========================================================================
tensor     shape                what
=========  ===================  ===========================================================================
a          (M, K), contiguous   first the rows for rank 0, then those for rank 1, ...
b          (K, N)               of each rank its own; row-major or transposed
out        (R, N)               first the rows from rank 0 times b, then those from rank 1, ...
gathered   (R, K)               the rows themselves
=========  ===================  ===========================================================================

By copy engines a rank's rows are multiplied where and when they arrive, the own ones first; by torch.distributed all rows go, and
then all are multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.ops import plain, rounds
from crossfade.ops.candidate import Candidate
from crossfade.ops.counts import Counts
from crossfade.ops.job import Job

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["all_to_all_matmul"]

_NAME = "all_to_all_matmul"


def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    group: PeerGroup,
    counts: Counts,
    candidate: Candidate,
    *,
    gathered: torch.Tensor | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """The product. All ranks call it in one order on a lane.

    Args:
        a: (M, K), contiguous.
        b: (K, N).
        group: the ranks.
        counts: what goes from each rank to each.
        candidate: of `matmul_all_to_all`; ``rounds`` is done as that, all others as ``plain``.
        gathered: (R, K), contiguous, gets the rows.
        lane: which lane of the group.

    Raises:
        DeviceError: the group or its lanes do not allow the candidate.
        ChannelBroken: a rank has died.
    """
    out = a.new_empty(sum(counts.received), b.shape[1])
    if not (counts.largest and a.shape[1]):
        group.do(out.zero_)
        return out
    job = Job(_NAME, group, lane, a, b, None, out, gathered, counts)
    if candidate.name == "rounds":
        rounds.all_to_all_first(job, **candidate.arguments)
    else:
        plain.all_to_all_first(job)
    return out
