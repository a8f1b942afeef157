"""From the arguments of ``execute`` to the values that the driver writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from crossfade.api.refs import Ref, resolve
from crossfade.plan.plan import InputSpec

_Pick = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class Splitter:
    """Takes the arguments of ``execute`` apart.

    ``inp`` is the one positional argument; ``inp[k]`` the k-th positional argument, or item k of the only one where the graph uses
    several; ``inp["x"]`` and ``inp.x`` the keyword argument x, or item or attribute x of the only positional argument.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        keys = [spec.key for spec in inputs if spec.key != "go"]
        self.takes_whole = keys == ["*"] and len(inputs) == 1
        self._positions = {int(key[1:-1]) for key in keys if key[0] == "[" and not key.startswith('["')}
        self._names = {name for key in keys if (name := _name(key)) is not None}
        self._has_whole = "*" in keys
        self._picks: list[_Pick] = [self._pick(spec.key) for spec in inputs]

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """One value for each input; references among the arguments are waited for. A TypeError says what the graph takes."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Ref):
                args, kwargs = resolve(args, kwargs)
                break
        if self.takes_whole and len(args) == 1 and not kwargs:
            return args
        self._check(args, kwargs)
        return [pick(args, kwargs) for pick in self._picks]

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unknown = sorted(set(kwargs) - self._names)
        if unknown:
            raise self._misfit(f"got the unexpected argument {unknown[0]!r}")
        if self._has_whole and (len(args) != 1 or kwargs):
            raise self._misfit(f"got {len(args)} positional and {len(kwargs)} keyword arguments")
        takes_it_apart = self._unpacks(args) or (self._names and len(args) == 1 and not kwargs)
        if not takes_it_apart and len(args) > max(self._positions, default=-1) + 1:
            raise self._misfit(f"got {len(args)} positional argument{'' if len(args) == 1 else 's'}")

    def _unpacks(self, args: tuple[Any, ...]) -> bool:
        """Whether the only argument is taken apart by position."""
        return len(args) == 1 and (
            self._has_whole or max(self._positions, default=0) > 0 or min(self._positions, default=0) < 0
        )

    def _misfit(self, problem: str) -> TypeError:
        takes = []
        if self._has_whole or (self._positions and self._positions != {0}):
            is_one = self._has_whole or min(self._positions) < 0
            takes.append("one positional argument" if is_one else f"{max(self._positions) + 1} positional arguments")
        elif self._positions:
            takes.append("1 positional argument")
        names = sorted(self._names)
        if self._has_whole and names:  # the whole comes as one argument, which the names are parts of
            takes.append(
                f"which has {_listed(names)} (as {'an item or an attribute' if len(names) == 1 else 'items or attributes'})"
            )
        else:
            takes += [f"{name}=" for name in names]
        return TypeError(f"execute() {problem}\nhint: this graph takes {', '.join(takes) or 'no arguments'}")

    def _pick(self, key: str) -> _Pick:
        if key == "go":
            return lambda args, kwargs: None
        if key == "*":
            return lambda args, kwargs: args[0]
        name = _name(key)
        if name is not None:
            return self._pick_name(name, by_attribute=key[0] == ".")
        return self._pick_position(int(key[1:-1]))

    def _pick_position(self, position: int) -> _Pick:
        def pick(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            source = args[0] if self._unpacks(args) else args
            try:
                return source[position]
            except (IndexError, KeyError, TypeError) as error:
                raise self._misfit(f"has no argument for inp[{position}] ({type(error).__name__}: {error})") from None

        return pick

    def _pick_name(self, name: str, *, by_attribute: bool) -> _Pick:
        def pick(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name in kwargs:
                return kwargs[name]
            if len(args) == 1:
                if isinstance(args[0], Mapping) and name in args[0]:
                    return args[0][name]
                if by_attribute and hasattr(args[0], name):
                    return getattr(args[0], name)
                with suppress(LookupError, TypeError, ValueError):
                    return args[0][name]
            raise self._misfit(f"is missing the argument {name!r}")

        return pick


def _name(key: str) -> str | None:
    """The name in ``.x`` or ``["x"]``; None for other keys."""
    if key.startswith("."):
        return key[1:]
    return str(json.loads(key[1:-1])) if key.startswith('["') else None


def _listed(names: Sequence[str]) -> str:
    """``x``, ``x and y``, ``x, y and z``."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
