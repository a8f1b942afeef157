"""Ray's import path for `crossfade.collective`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.collective import ReduceOp, allgather, allreduce, broadcast, reducescatter
from crossfade.not_here import refuse_others

__all__ = ["ReduceOp", "allgather", "allreduce", "broadcast", "reducescatter"]

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
