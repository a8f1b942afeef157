"""Ray's import path of user-defined communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.graph.communicators import Communicator, TorchTensorAllocator
from crossfade.not_here import refuse_others
from crossfade.types import ReduceOp

__all__ = ["Communicator", "ReduceOp", "TorchTensorAllocator"]

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
