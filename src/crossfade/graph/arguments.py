"""The arguments of a bound method: copied when they are bound, and looked through for nodes.

Containers are lists, tuples and dicts, of exactly these types; everything else is a leaf and is never looked into.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crossfade.errors import GraphError

__all__ = ["MAX_DEPTH", "leaves", "snapshot"]

MAX_DEPTH = 100
"""How deep containers may be nested in one another."""


def snapshot(template: Any, around: tuple[int, ...] = ()) -> Any:
    """``template`` with its containers copied, so that a later change of the caller's lists and dicts does not reach it.

    Leaves, and the keys of dicts, stay the same objects.

    Args:
        template: a container or a leaf.
        around: the ids of the containers around it.

    Raises:
        GraphError: a container contains itself, or containers are nested deeper than `MAX_DEPTH`.
    """
    kind = type(template)
    if kind is dict:
        inside = _enter(template, around)
        return {key: snapshot(value, inside) for key, value in template.items()}
    if kind is list or kind is tuple:
        inside = _enter(template, around)
        return kind([snapshot(item, inside) for item in template])
    return template


def leaves(template: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """The leaves of ``template``, in order of appearance; each as often as it appears. Keys of dicts are leaves too.

    Raises:
        GraphError: as for `snapshot`.
    """
    kind = type(template)
    if kind is dict:
        inside = _enter(template, around)
        for key, value in template.items():
            yield key
            yield from leaves(value, inside)
    elif kind is list or kind is tuple:
        inside = _enter(template, around)
        for item in template:
            yield from leaves(item, inside)
    else:
        yield template


def _enter(container: Any, around: tuple[int, ...]) -> tuple[int, ...]:
    """The ids of the containers around the items of ``container``."""
    if id(container) in around:
        raise GraphError(
            f"a {type(container).__name__} among the arguments contains itself",
            hint="bind a copy that ends, or an object of your own class, which is passed as it is",
        )
    if len(around) == MAX_DEPTH:
        raise GraphError(
            f"the arguments are nested deeper than {MAX_DEPTH} lists, tuples and dicts",
            hint="wrap the value in an object of your own class, which is passed as it is",
        )
    return (*around, id(container))
