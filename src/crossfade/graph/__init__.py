"""What the user says, as data: nodes, the mistakes to be found in them, drawings. Knows nothing of how a graph runs."""

from crossfade.graph.check import CheckedGraph
from crossfade.graph.hook import install_compiler
from crossfade.graph.nodes import (
    ActorInfo,
    InputNode,
    InputPart,
    MethodNode,
    MultiOutputNode,
    Node,
    OutputNode,
    bind,
    walk,
)
from crossfade.graph.type_hints import TorchTensorType

__all__ = [
    "ActorInfo",
    "CheckedGraph",
    "InputNode",
    "InputPart",
    "MethodNode",
    "MultiOutputNode",
    "Node",
    "OutputNode",
    "TorchTensorType",
    "bind",
    "install_compiler",
    "walk",
]
