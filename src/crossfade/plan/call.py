"""The arguments of a node's method: constants, with holes where values of the graph go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Hole:
    """Stands for one of the node's inputs."""

    index: int  # position in ``NodeSpec.inputs``


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one method call.

    Holes are found at the top level and inside lists, tuples and dicts (as values), however deep.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def fill(template: Any, values: Sequence[Any]) -> Any:
    """``template`` with each hole replaced by its value; containers that hold holes are copied."""
    kind = type(template)
    if kind is Hole:
        return values[template.index]
    if kind is list:
        return [fill(item, values) for item in template]
    if kind is tuple:
        return tuple(fill(item, values) for item in template)
    if kind is dict:
        return {key: fill(item, values) for key, item in template.items()}
    return template
