"""Ray's import path of ``TorchTensorType``, the argument of ``node.with_type_hint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.graph.type_hints import TorchTensorType
from crossfade.not_here import refuse_others

__all__ = ["TorchTensorType"]

if not TYPE_CHECKING:
    __getattr__ = refuse_others(__name__)
