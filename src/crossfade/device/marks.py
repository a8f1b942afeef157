"""Marks of what this library does, in a trace of torch's profiler: ``crossfade copy``, ``crossfade all_gather_matmul``.

They are there while a profiler runs, with `crossfade.record` or without, and cost a look at one variable while none does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["mark", "marked"]

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = nullcontext()


def mark(name: str) -> AbstractContextManager[Any]:
    """A range with this name, behind ``crossfade``, around what is inside the block."""
    profiler = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:
        return _NOTHING
    range_: AbstractContextManager[Any] = profiler.record_function(f"crossfade {name}")
    return range_


def marked(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The same around each call of a function."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with mark(name):
                return function(*args, **kwargs)

        return called

    return decorate
