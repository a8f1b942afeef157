"""What the user says, as data: nodes, the mistakes to be found in them, drawings. Knows nothing of how a graph runs."""

from crossfade.graph.check import CheckedGraph
from crossfade.graph.collectives import CollectiveNode, CollectiveOutput, bind_collective
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
)
from crossfade.graph.type_hints import TorchTensorType
from crossfade.graph.walk import walk

__all__ = [
    "ActorInfo",
    "CheckedGraph",
    "CollectiveNode",
    "CollectiveOutput",
    "InputNode",
    "InputPart",
    "MethodNode",
    "MultiOutputNode",
    "Node",
    "OutputNode",
    "TorchTensorType",
    "bind",
    "bind_collective",
    "install_compiler",
    "walk",
]
