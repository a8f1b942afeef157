"""From nodes to the nodes that they are made from."""

from __future__ import annotations

from collections.abc import Iterable

from crossfade.graph.nodes import InputNode, InputPart, Node

__all__ = ["inputs_of", "parts_of", "walk"]


def parts_of(whole: InputNode) -> tuple[InputPart, ...]:
    """The parts of the input that were ever asked for."""
    return tuple(whole._parts.values())


def inputs_of(node: Node) -> tuple[Node, ...]:
    """The nodes that a node is directly made from."""
    return node._sources()


def walk(outputs: Iterable[Node]) -> list[Node]:
    """The outputs and all nodes that they are made from, directly or not, in the order of their creation."""
    found = dict.fromkeys(outputs)
    pending = list(found)
    while pending:
        for source in inputs_of(pending.pop()):
            if source not in found:
                found[source] = None
                pending.append(source)
    return sorted(found, key=lambda node: node._order)
