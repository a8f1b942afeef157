"""Ray's import path of ``TorchTensorType``, the argument of ``node.with_type_hint``."""

from __future__ import annotations

from crossfade.graph.type_hints import TorchTensorType
from crossfade.not_here import refuse_others

__all__ = ["TorchTensorType"]

refuse_others(__name__)
