"""Waits for what comes about by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from crossfade.channels.protocol import EMPTY

Result = TypeVar("Result")


def until(
    is_so: Callable[[], Result],
    what: str = "it",
    limit_s: float = 20.0,
    then: Callable[[], object] | None = None,
    pause_s: float = 0,
) -> Result:
    """What ``is_so`` returns once that is true. Between two looks ``then`` is called, and nothing is done for so long."""
    deadline = time.monotonic() + limit_s
    while not (result := is_so()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} has not come about in {limit_s} s")
        if then is not None:
            then()
        time.sleep(pause_s)
    return result


def take(reader: Any) -> Any:
    """The next value, when it comes."""
    found: list[Any] = []

    def attempt() -> bool:
        value = reader.try_read()
        if value is not EMPTY:
            found.append(value)
        return bool(found)

    until(attempt, "a value")
    return found[0]
