"""Ray's import path of the older type hints: ``from crossfade.experimental.channel.torch_tensor_type import TorchTensorType``."""

from crossfade.graph.type_hints import TorchTensorType

__all__ = ["TorchTensorType"]
