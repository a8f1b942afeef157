"""Ray's import path of user-defined communicators."""

from __future__ import annotations

from crossfade.graph.communicators import Communicator, TorchTensorAllocator
from crossfade.not_here import refuse_others
from crossfade.types import ReduceOp

__all__ = ["Communicator", "ReduceOp", "TorchTensorAllocator"]

refuse_others(__name__)
