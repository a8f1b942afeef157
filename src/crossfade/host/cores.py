"""Which core a thread looks for work on. Two processes that wait for each other's answers by looking for them must not share one:
neither runs while the other looks. The system leaves them together: whoever wakes another one puts it beside itself.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from random import randint
from typing import Final

from crossfade.host.memory import libc

_yield_core = os.sched_yield
_LONG_NS: Final = 4_000
"""A yield that takes so long has let somebody else run."""
_FEWEST: Final = 2
_MOST: Final = 6
_WITHIN_NS: Final = 30_000_000
_REST_NS: Final = 1_000_000


class Core:
    """The core on which a thread looks for something.

    After two to six long yields within 30 ms the thread moves to another core that it may use, at most once in a millisecond. How
    many is drawn each time, so that of two which look for each other one moves first, and the other has no long yields any more.
    """

    def __init__(self) -> None:
        self.num_moves = 0
        self._limit = randint(_FEWEST, _MOST)
        self._num_long = 0
        self._first_ns = 0  # when the first of them was
        self._moved_ns = 0

    def give_way(self) -> None:
        """Yields the core; moves to another one if others use it again and again."""
        start_ns = time.monotonic_ns()
        _yield_core()
        now_ns = time.monotonic_ns()
        if now_ns - start_ns < _LONG_NS:
            return
        if now_ns - self._first_ns > _WITHIN_NS:
            self._first_ns, self._num_long = now_ns, 0
        self._num_long += 1
        if self._num_long >= self._limit and now_ns - self._moved_ns > _REST_NS:
            self._moved_ns, self._num_long, self._limit = now_ns, 0, randint(_FEWEST, _MOST)
            self._move()

    def _move(self) -> None:
        """Leaves the set of cores that the thread may use as it is."""
        allowed = os.sched_getaffinity(0)
        others = allowed - {libc().sched_getcpu()}
        if others:
            self.num_moves += 1
            with suppress(OSError):  # they were switched off just now
                os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, allowed)
