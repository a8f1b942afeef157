"""Ray's import path of ``TorchTensorType``, the argument of ``node.with_type_hint``."""

from crossfade.graph.type_hints import TorchTensorType

__all__ = ["TorchTensorType"]
