"""Ray's import path of nodes, under Ray's names."""

from crossfade.api import CompiledGraph  # also makes graphs compile
from crossfade.graph.nodes import InputNode, InputPart, MethodNode, MultiOutputNode, Node

__all__ = ["ClassMethodNode", "CompiledDAG", "DAGNode", "InputAttributeNode", "InputNode", "MultiOutputNode"]

ClassMethodNode = MethodNode
CompiledDAG = CompiledGraph
DAGNode = Node
InputAttributeNode = InputPart
