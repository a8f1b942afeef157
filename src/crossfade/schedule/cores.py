"""Processor sharing: work of many parties on the cores of one host, in virtual time.

With k parties at work on C cores, each one runs at the rate min(1, C / k). The virtual clock runs at that rate, so a
piece of work of w microseconds ends when the virtual clock has gone on by w, whoever comes and goes meanwhile: a heap
of ends is enough, and each change costs O(log k).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Cores", "Work"]


@dataclass(slots=True, eq=False)
class Work:
    """One piece of work on the cores.

    Attributes:
        done: called, with the cores' clock at its end, when the work is over.
        factor: how much longer it takes than alone.
        end: on the virtual clock.
        version: how often ``end`` was set; an entry of the heap with another version is out of date.
    """

    done: Callable[[], None]
    factor: float
    end: float = 0.0
    version: int = 0


@dataclass(slots=True)
class Cores:
    """The cores of one host.

    Attributes:
        num_cores: how many there are.
        now_us: the real clock.
        num_events: entries that the heap has seen, a measure of the work done here.
    """

    num_cores: int
    now_us: float = 0.0
    num_events: int = 0
    _virtual: float = 0.0
    _num_busy: int = 0
    _ends: list[tuple[float, int, int, Work]] = field(default_factory=list)

    def start(self, work_us: float, done: Callable[[], None], factor: float = 1.0) -> Work:
        """Starts a piece of work that takes ``work_us * factor`` on a core of its own."""
        work = Work(done, factor, self._virtual + work_us * factor)
        self._num_busy += 1
        self._push(work)
        return work

    def slow_down(self, work: Work, factor: float) -> None:
        """From now on, what is left of the work takes ``factor`` times as long as alone."""
        if factor != work.factor:
            work.end = self._virtual + (work.end - self._virtual) * factor / work.factor
            work.factor = factor
            work.version += 1
            self._push(work)

    def next_end_us(self) -> float:
        """When the next piece of work ends if nothing changes before; infinity when there is none."""
        while self._ends and self._ends[0][2] != self._ends[0][3].version:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return self.now_us + max(0.0, self._ends[0][0] - self._virtual) / self._rate()

    def advance(self, to_us: float) -> None:
        """Moves the clocks, at most to ``next_end_us``."""
        self._virtual += (to_us - self.now_us) * self._rate()
        self.now_us = to_us

    def finish_next(self) -> None:
        """Moves the clocks to the end of the next piece of work, and ends it."""
        self.now_us = self.next_end_us()
        work = heapq.heappop(self._ends)[-1]
        self._virtual = max(self._virtual, work.end)
        self._num_busy -= 1
        work.done()

    def _push(self, work: Work) -> None:
        self.num_events += 1
        heapq.heappush(self._ends, (work.end, self.num_events, work.version, work))

    def _rate(self) -> float:
        return min(1.0, self.num_cores / self._num_busy) if self._num_busy else 1.0
