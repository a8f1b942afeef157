"""Ray's import path of nodes, under Ray's names."""

from __future__ import annotations

from crossfade.api import CompiledGraph  # the import also installs the compiler
from crossfade.api.context import DAGContext
from crossfade.graph.nodes import InputNode, InputPart, MethodNode, MultiOutputNode, Node
from crossfade.not_here import refuse_others

__all__ = [
    "ClassMethodNode",
    "CompiledDAG",
    "DAGContext",
    "DAGNode",
    "InputAttributeNode",
    "InputNode",
    "MultiOutputNode",
]

ClassMethodNode = MethodNode
CompiledDAG = CompiledGraph
DAGNode = Node
InputAttributeNode = InputPart

refuse_others(__name__)
