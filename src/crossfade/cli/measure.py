"""Timing executions, and what to say of the times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from crossfade.api import CompiledGraph, get
from crossfade.cli.exits import WrongResult

__all__ = ["alone_us", "in_flight_us", "median", "p99", "show_us"]

Check = Callable[[Any, Any], bool]
"""Of an input and its result: whether the result is right."""


def alone_us(graph: CompiledGraph, inputs: Iterable[Any], is_right: Check, *, pause_s: float = 0.0) -> list[float]:
    """Executes one input after another, each when the last result is there. Returns microseconds from ``execute`` to each result.

    ``is_right`` looks at every result, outside the time that is measured. ``pause_s`` is idle time before each execution.
    """
    times_us = []
    clock, sleep, execute = time.perf_counter_ns, time.sleep, graph.execute
    for value in inputs:
        if pause_s:
            sleep(pause_s)
        start_ns = clock()
        result = get(execute(value))
        times_us.append((clock() - start_ns) / 1000)
        if not is_right(value, result):
            raise WrongResult(f"the result for {value!r:.40}", result, value)
    return times_us


def in_flight_us(graph: CompiledGraph, inputs: Sequence[Any], num_inflight: int) -> tuple[list[float], list[Any]]:
    """Executes all inputs, with several under way at once. Returns microseconds from the first ``execute`` to each result, and the
    results.
    """
    waiting: deque[Any] = deque()
    times_us: list[float] = []
    results: list[Any] = []
    start_ns = time.perf_counter_ns()

    def collect() -> None:
        results.append(get(waiting.popleft()))
        times_us.append((time.perf_counter_ns() - start_ns) / 1000)

    for value in inputs:
        if len(waiting) == num_inflight:
            collect()
        waiting.append(graph.execute(value))
    while waiting:
        collect()
    return times_us, results


def p99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds; the largest of fewer than a hundred."""
    in_order = sorted(values)
    return in_order[min(len(in_order) - 1, int(len(in_order) * 0.99))]


def show_us(time_us: float) -> str:
    """A time in microseconds, to three digits or to the microsecond."""
    if time_us >= 100:
        return f"{time_us:,.0f}"
    return f"{time_us:.1f}" if time_us >= 10 else f"{time_us:.2f}"
