"""The arguments of a bound method: copied when they are bound, and looked through for nodes.

Containers are lists, tuples and dicts, of exactly these types; everything else is a leaf and is never looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from crossfade.errors import GraphError

MAX_DEPTH = 100
"""How deep containers may be nested in one another."""

CONTAINERS = (list, tuple, dict)
_MAY_HIDE = (*CONTAINERS, set, frozenset)
MAX_SHOWN_LETTERS = 24
MAX_SHOWN_ITEMS = 4
MAX_SHOWN_DEPTH = 2

T = TypeVar("T")
Naming = Callable[[Any], str | None]
"""Gives the name of a leaf that has one."""


def snapshot(template: Any, of_leaf: Callable[[Any], Any] = lambda leaf: leaf, around: tuple[int, ...] = ()) -> Any:
    """``template`` with its containers copied, so that a later change of the caller's lists does not reach it.

    Leaves become what ``of_leaf`` gives for them; the keys of dicts stay the same objects. ``around`` has the ids of the containers
    around it. Raises a `GraphError` for a container that contains itself, or is nested deeper than `MAX_DEPTH`.
    """
    kind = type(template)
    if kind is dict:
        inside = _enter(template, around)
        return {key: snapshot(value, of_leaf, inside) for key, value in template.items()}
    if kind is list or kind is tuple:
        inside = _enter(template, around)
        return kind([snapshot(item, of_leaf, inside) for item in template])
    return of_leaf(template)


def leaves(template: Any, around: tuple[int, ...] = ()) -> list[Any]:
    """The leaves of ``template``, in order of appearance; each as often as it appears. Keys of dicts are leaves too."""
    kind = type(template)
    if kind not in CONTAINERS:
        return [template]
    inside = _enter(template, around)
    found: list[Any] = []
    if kind is dict:
        for key, value in template.items():
            found += (key, *leaves(value, inside))
        return found
    for item in template:
        if type(item) in CONTAINERS:
            found += leaves(item, inside)
        else:
            found.append(item)
    return found


def find_hidden(template: Any, sought: type[T]) -> tuple[T, str] | None:
    """The first object of a type that is in a container but is none of its `leaves` that can be replaced, and where it is.

    That is: a key of a dict, or an item of a set or of an instance of a subclass of list, tuple, dict or set.
    """
    pending = [template]
    while pending:
        value = pending.pop()
        if not isinstance(value, _MAY_HIDE):
            continue
        if isinstance(value, dict):
            key = next((key for key in value if isinstance(key, sought)), None)
            if key is not None:
                return key, "as a key of a dict"
        items = value.values() if isinstance(value, dict) else value
        if type(value) in CONTAINERS:
            pending += items
            continue
        item = next((item for item in items if isinstance(item, sought)), None)
        if item is not None:
            return item, f"in a {type(value).__name__}"
    return None


def brief(args: Sequence[Any], kwargs: Mapping[str, Any], *, name_of: Naming) -> str:
    """Arguments in a few letters, as in a call: ``inp.x, [1, 2], <ndarray>, scale=2.0``.

    Never calls the repr of a user's class, which may be long, slow or wrong.
    """
    named = [f"{name}={_brief(value, name_of, 0)}" for name, value in islice(kwargs.items(), MAX_SHOWN_ITEMS)]
    more = ["..."] if len(kwargs) > MAX_SHOWN_ITEMS else []
    return ", ".join([*_brief_items(args, name_of, 0), *named, *more])


def _brief(value: Any, name_of: Naming, depth: int) -> str:
    kind = type(value)
    name = name_of(value)
    if name is not None:
        return name
    if kind in CONTAINERS and value and depth == MAX_SHOWN_DEPTH:
        return f"<{kind.__name__}>"
    if kind is list:
        return f"[{', '.join(_brief_items(value, name_of, depth + 1))}]"
    if kind is tuple:
        return f"({', '.join(_brief_items(value, name_of, depth + 1))}{',' if len(value) == 1 else ''})"
    if kind is dict:
        pairs = islice(value.items(), MAX_SHOWN_ITEMS)
        shown = [f"{_brief(key, name_of, depth + 1)}: {_brief(item, name_of, depth + 1)}" for key, item in pairs]
        return f"{{{', '.join([*shown, '...'] if len(value) > MAX_SHOWN_ITEMS else shown)}}}"
    return _brief_leaf(value)


def _brief_leaf(value: Any) -> str:
    kind = type(value)
    if kind in (bool, float, type(None)) or (kind is int and value.bit_length() <= 64):
        return repr(value)
    if kind in (str, bytes):
        return repr(value) if len(value) <= MAX_SHOWN_LETTERS else f"{value[:MAX_SHOWN_LETTERS]!r}..."
    return f"<{kind.__name__}>"


def _brief_items(items: Sequence[Any], name_of: Naming, depth: int) -> list[str]:
    shown = [_brief(item, name_of, depth) for item in items[:MAX_SHOWN_ITEMS]]
    return [*shown, "..."] if len(items) > MAX_SHOWN_ITEMS else shown


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
