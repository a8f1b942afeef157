"""Ray's import path for `crossfade.collective`."""

from __future__ import annotations

from crossfade.collective import ReduceOp, allgather, allreduce, broadcast, reducescatter

__all__ = ["ReduceOp", "allgather", "allreduce", "broadcast", "reducescatter"]
