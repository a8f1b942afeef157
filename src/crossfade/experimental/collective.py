"""Ray's import path for `crossfade.collective`."""

from __future__ import annotations

from crossfade.collective import ReduceOp, allgather, allreduce, broadcast, reducescatter
from crossfade.not_here import refuse_others

__all__ = ["ReduceOp", "allgather", "allreduce", "broadcast", "reducescatter"]

refuse_others(__name__)
