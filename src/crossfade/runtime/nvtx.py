"""Ranges around methods: on where the environment variable ``CROSSFADE_NVTX`` is set when a graph is compiled.

With 1 they are NVTX's, for Nsight Systems; with ``profiler`` they are torch's, for traces of `crossfade.record` and torch.profiler.
Whether there are any is decided once, when an actor's steps are bound, so they cost nothing when they are off.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from crossfade.marks import mark
from crossfade.runtime.cursor import Step

VARIABLE = "CROSSFADE_NVTX"
_PROFILER = "profiler"


class Ranges:
    """Marks what a thread does: ``push`` begins a range with a name, ``pop`` ends the range that began last."""

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push = push
        self._pop = pop

    def wrap(self, step: Step, name: str) -> Step:
        """The same step, in a range."""
        push, pop = self._push, self._pop

        def ranged() -> bool:
            push(name)
            try:
                return step()
            finally:
                pop()

        return ranged


def find_ranges() -> Ranges | None:
    """Ranges by the package ``nvtx``, or else by torch where this process has imported it; None where they are off.

    Where they are on and neither is there, that is printed.
    """
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return None
    if os.environ[VARIABLE] == _PROFILER:
        return _by_profiler()
    ranges = _by_nvtx() or _by_torch()
    if ranges is None:
        print(
            f"crossfade: {VARIABLE} is set, and there is neither the package nvtx nor torch with CUDA: no ranges\n"
            "hint: pip install nvtx",
            file=sys.stderr,
            flush=True,
        )
    return ranges


def _by_nvtx() -> Ranges | None:
    try:
        nvtx = importlib.import_module("nvtx")
    except ImportError:
        return None
    return Ranges(nvtx.push_range, nvtx.pop_range)


def _by_profiler() -> Ranges:
    """Ranges of torch's profiler, while one runs in the actor's process."""
    open_ranges: list[AbstractContextManager[Any]] = []

    def push(name: str) -> None:
        range_ = mark(name)
        open_ranges.append(range_)
        range_.__enter__()

    return Ranges(push, lambda: open_ranges.pop().__exit__(None, None, None))


def _by_torch() -> Ranges | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    ranges = Ranges(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    try:
        ranges.wrap(lambda: True, "crossfade")()
    except RuntimeError:  # torch was built without CUDA
        return None
    return ranges
