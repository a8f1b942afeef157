"""Objects of figures in JSON, which a measurement keeps or a person writes: read, and refused with a hint where they are wrong."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any

from crossfade.hints import nearest

__all__ = ["arguments_of", "check_figure", "check_whole", "is_figure", "parsed", "written"]


def parsed(text: str, what: str, hint: str) -> Any:
    """What a file has (ValueError where it is no JSON)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no {what}: {error}\nhint: {hint}") from error


def written(data: Any) -> str:
    """What `parsed` reads; numpy's figures are written as Python's."""
    return json.dumps(data, indent=1, default=_plain)


def _plain(figure: Any) -> int | float:
    if not isinstance(figure, Real):
        raise TypeError(f"{figure!r} is no figure")
    return int(figure) if isinstance(figure, Integral) else float(figure)


def arguments_of(kind: type[Any], data: Any, where: str, hint: str) -> dict[str, Any]:
    """An object of a file as keyword arguments of its dataclass, checked for its names (ValueError)."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {data!r}\nhint: it is an object; {hint}")
    items = fields(kind)
    names = [item.name for item in items]
    for name in data:
        if name not in names:
            near = nearest(name, names, f"it has {', '.join(names)}")
            raise ValueError(f"{where} has {name!r}, which means nothing there\nhint: {near}")
    needed = [item.name for item in items if item.default is MISSING and item.default_factory is MISSING]
    missing = [name for name in needed if name not in data]
    if missing:
        raise ValueError(f"{where} has no {missing[0]!r}\nhint: it needs {', '.join(needed)}; {hint}")
    return dict(data)


def is_figure(figure: Any, least: float = 0.0) -> bool:
    """Whether it is a finite number of at least ``least``; numpy's count."""
    is_number = type(figure) is not bool and isinstance(figure, Real)
    try:
        return is_number and bool(figure >= least) and math.isfinite(figure)
    except OverflowError:  # an integer of 310 digits
        return False


def check_figure(name: str, figure: object, least: float = 0.0) -> None:
    """Refuses what is not `is_figure` (ValueError)."""
    if not is_figure(figure, least):
        least_text = f"at least {least:g}" if least >= 1 else "not negative" if least == 0 else "more than 0"
        raise ValueError(f"{name} is {_shown(figure)}\nhint: figures are finite numbers, and {least_text}")


def check_whole(name: str, number: Any, least: int) -> None:
    """Refuses what is no whole number of at least ``least`` (ValueError)."""
    is_whole = type(number) is not bool and isinstance(number, Integral)
    if not (is_whole and least <= number <= sys.maxsize):
        raise ValueError(f"{name} is {_shown(number)}\nhint: it is a whole number of at least {least}")


def _shown(figure: object) -> str:
    """Integers that Python refuses to write out are too large."""
    return "too large" if isinstance(figure, int) and abs(figure) > sys.float_info.max else repr(figure)
