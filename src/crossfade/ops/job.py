"""What a way to do an operator is given: checked operands, and outputs to fill.

Letters, for all of this room: W ranks, r this one, p another; ``a`` (M, K), ``b`` (K, N), and the product (M, N) of each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from crossfade.ops.counts import Counts
    from crossfade.peers.group import PeerGroup

__all__ = ["Job", "Once", "Way"]


class Once:
    """Work that is enqueued at its first call, and never again.

    It belongs to one call of an operator. A way that captures itself, to be replayed by later calls, must not capture it too: then
    it is left for the end of the operator, where the stream is as it was at the beginning.

    Args:
        work: enqueues it; None for nothing.
        is_capturing: whether what is enqueued now is captured.
    """

    def __init__(self, work: Callable[[], object] | None, is_capturing: Callable[[], bool] | None = None) -> None:
        self._work = work
        self._is_capturing = is_capturing if work is not None else None
        self._is_captured = self._is_capturing is not None and self._is_capturing()

    def __bool__(self) -> bool:
        return self._work is not None

    def __call__(self) -> None:
        """Enqueues it, if nobody has."""
        if self._work is not None and self._is_capturing is not None and self._is_capturing() != self._is_captured:
            return
        work, self._work = self._work, None
        if work is not None:
            work()


_NOTHING = Once(None)


@dataclass(frozen=True, slots=True)
class Job:
    """One call of an operator.

    Attributes:
        name: of the operator, for errors.
        group: whose ranks do it.
        lane: the number of the lane.
        a: (M, K).
        b: (K, N), contiguous or the transpose of a contiguous one.
        bias: (N,), or None where this rank adds none.
        out: 2 dimensions, contiguous; what the operator gives.
        gathered: all-gather: (W M, K), contiguous; gets all ranks' ``a``, if anybody asked for them.
        counts: all-to-all: the rows from each rank to each.
        has_bias: the caller gave one, which another rank may add.
        is_new_out: nobody has seen ``out`` yet.
        fill: the caller's own work. A way calls it where the stream would else wait for other ranks; the operator calls it at its
            end, in case the way did not.
    """

    name: str
    group: PeerGroup
    lane: int
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    gathered: torch.Tensor | None = None
    counts: Counts | None = None
    has_bias: bool = False
    is_new_out: bool = False
    fill: Once = _NOTHING

    @property
    def num_columns(self) -> int:
        """N."""
        return self.b.shape[1]

    def empty(self, *shape: int) -> torch.Tensor:
        """A tensor of the operands' type and device, with nothing in it yet."""
        return self.a.new_empty(shape)


Way = Callable[..., None]
"""A function that is given a `Job`, and the parameters of its candidate by name, and fills the outputs."""
