"""Ray's import path of the older type hints: ``from crossfade.experimental.channel.torch_tensor_type import TorchTensorType``."""

from __future__ import annotations

from crossfade.graph.communicators import Communicator, CPUCommunicator
from crossfade.graph.type_hints import TorchTensorType
from crossfade.not_here import refuse_others

__all__ = ["CPUCommunicator", "Communicator", "TorchTensorType"]

refuse_others(__name__)
