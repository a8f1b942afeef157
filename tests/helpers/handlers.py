"""Handlers of signals that come in the middle of a call, and small graphs for them to meddle with."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import crossfade
from crossfade.api.session import require
from tests.helpers.signals import sent_once


class Late(Exception):
    """What a handler of SIGALRM raises."""


class Worker:
    def same(self, value: Any) -> Any:
        return value

    def pair(self, one: Any, other: Any) -> tuple[Any, Any]:
        return one, other

    def slow(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def until(self, fifo: str) -> None:
        """Returns when somebody writes to it."""
        with open(fifo):
            pass


Remote = crossfade.remote(Worker)


def three_actors() -> tuple[Any, ...]:
    return tuple(Remote.remote() for _ in range(3))


def pairs(*actors: Any) -> crossfade.CompiledGraph:
    """Both inputs go to another actor each, so that they are written one after the other; to new ones where none are given."""
    one, other, third = actors or three_actors()
    with crossfade.InputNode() as inp:
        graph: crossfade.CompiledGraph = third.pair.bind(one.same.bind(inp[0]), other.same.bind(inp[1])).compile()
    return graph


@contextmanager
def handler(act: Callable[[], object], after_s: float) -> Iterator[None]:
    """Does something in the main thread in so many seconds, wherever it is then."""
    before, begin_s = signal.signal(signal.SIGALRM, lambda *_: act()), time.monotonic()
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, after_s)  # the test's own time limit has this clock, too
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - begin_s), 0.001))


@contextmanager
def handler_once(act: Callable[[], object], is_so: Callable[[], object]) -> Iterator[None]:
    """Does something in the main thread when it has come to where something is so, and stays there."""
    has_come = threading.Event()

    def handle(*_: object) -> None:
        if not has_come.is_set():
            has_come.set()
            act()

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        with sent_once(signal.SIGUSR2, is_so, has_come):
            yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def sleeps() -> Callable[[], bool]:
    """Looks whether the main thread slept when it was looked at before, and has slept since. (While it takes a result in, a handler
    may not.)
    """
    bell: Any = require().engine.doorbell  # type: ignore[attr-defined]
    seen: list[tuple[int, int]] = []

    def look() -> bool:
        seen.append((bell._sleeper, bell._num_wakes))
        return seen[-1][0] == threading.main_thread().ident and seen[-2:-1] == seen[-1:]

    return look


def with_a_handler(move: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    """Does it, and then once what a signal's handler does there."""
    is_due = True

    def moved(*args: Any) -> Any:
        nonlocal is_due
        result = move(*args)
        if is_due:
            is_due = False
            act()
        return result

    return moved


def slow_graph() -> crossfade.CompiledGraph:
    graph: crossfade.CompiledGraph = Remote.remote().slow.bind(crossfade.InputNode()).compile()
    graph.execute(0.01).get()
    return graph
