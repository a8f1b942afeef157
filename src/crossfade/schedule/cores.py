"""The cores of one host, shared by the work of many parties, as an operating system shares them.

A piece of work starts on the core that has least to do. The k pieces on a core run at the rate 1 / k each. They stay where
they are: a core that has become idle takes one over from a core with several only after ``balance_us``, for kernels look
for such work seldom. Work that *roams* (many short stretches, each of which starts on an idle core if there is one) is
taken over at once.

Each core has a virtual clock that runs at its rate, so that a piece of work of w microseconds ends when that clock has gone
on by w, whoever comes and goes meanwhile. A change costs O(log k) and a look at each core in use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Cores", "Work"]


@dataclass(slots=True, eq=False)
class Work:
    """One piece of work on the cores."""

    done: Callable[[], None]  # called, with the cores' clock at its end, when the work is over
    factor: float  # how much longer it takes than alone
    roams: bool  # whether an idle core takes it over at once
    core: _Core  # where it is
    end: float = 0.0  # on the core's virtual clock
    version: int = 0  # how often ``end`` was set; an entry of a heap with another version is out of date


@dataclass(slots=True, eq=False)
class _Core:
    works: dict[Work, None] = field(default_factory=dict)  # what runs on it, in the order in which it came
    clock: float = 0.0  # the virtual clock, right at ``at_us``
    at_us: float = 0.0
    idle_since_us: float = 0.0  # when it had nothing to do any more
    ends: list[tuple[float, int, int, Work]] = field(default_factory=list)  # a heap of (end, number, version, work)

    def catch_up(self, now_us: float) -> None:
        """Brings the virtual clock to the real one."""
        self.clock += (now_us - self.at_us) / max(1, len(self.works))
        self.at_us = now_us

    def next_end_us(self) -> float:
        """When the next piece of work ends if nothing changes before; infinity when there is none."""
        while self.ends and not self._is_current(self.ends[0]):
            heapq.heappop(self.ends)
        if not self.ends:
            return math.inf
        return self.at_us + max(0.0, self.ends[0][0] - self.clock) * len(self.works)

    def _is_current(self, entry: tuple[float, int, int, Work]) -> bool:
        work = entry[3]
        return work.core is self and work in self.works and work.version == entry[2]


@dataclass(slots=True)
class Cores:
    """The cores of one host."""

    num_cores: int
    balance_us: float = 0.0  # how long a core is idle before it takes work over from another one
    now_us: float = 0.0  # the real clock
    num_events: int = 0  # entries that the heaps have seen, a measure of the work done here
    _used: list[_Core] = field(default_factory=list)

    def start(self, work_us: float, done: Callable[[], None], factor: float = 1.0, *, roams: bool = False) -> Work:
        """Starts a piece of work that takes ``work_us * factor`` on a core of its own."""
        work = Work(done, factor, roams, self._least_loaded())
        self._add(work, work_us * factor)
        return work

    def slow_down(self, work: Work, factor: float) -> None:
        """From now on, what is left of the work takes ``factor`` times as long as alone."""
        if factor != work.factor and work in work.core.works:
            work.core.catch_up(self.now_us)
            self._push(work, (work.end - work.core.clock) * factor / work.factor)
            work.factor = factor

    def next_end_us(self) -> float:
        """When work ends, or goes to another core, if nothing changes before; infinity when neither will be."""
        return self._next()[0]

    def advance(self, to_us: float) -> None:
        """Moves the clock, at most to ``next_end_us``."""
        self.now_us = to_us

    def finish_next(self) -> None:
        """Moves the clock to ``next_end_us``, and ends the piece of work, or lets it go to the other core."""
        self.now_us, core = self._next()
        if not core.works:
            self._take_over(core)
            return
        core.catch_up(self.now_us)
        work = heapq.heappop(core.ends)[3]
        core.clock = max(core.clock, work.end)
        self._remove(work)
        work.done()

    def _next(self) -> tuple[float, _Core]:
        """When something happens next, and on which core: an end on a busy one, a take-over by an idle one."""
        found = (math.inf, _Core())
        is_crowded = any(len(core.works) > 1 for core in self._used)
        for core in self._used:
            if core.works:
                time_us = core.next_end_us()
            else:
                time_us = max(self.now_us, core.idle_since_us + self.balance_us) if is_crowded else math.inf
            if time_us < found[0]:
                found = time_us, core
        return found

    def _least_loaded(self) -> _Core:
        core = min(self._used, key=lambda core: len(core.works), default=None)
        if core is None or (core.works and len(self._used) < self.num_cores):
            core = _Core(at_us=self.now_us)
            self._used.append(core)
        return core

    def _add(self, work: Work, rest: float) -> None:
        work.core.catch_up(self.now_us)
        work.core.works[work] = None
        self._push(work, rest)

    def _remove(self, work: Work) -> None:
        core = work.core
        del core.works[work]
        if not core.works:
            core.idle_since_us = self.now_us
            if any(other.roams for each in self._used if len(each.works) > 1 for other in each.works):
                self._take_over(core)

    def _take_over(self, core: _Core) -> None:
        """An idle core gets work from the most crowded one: what roams, else what came last."""
        crowded = max(
            self._used, key=lambda each: (len(each.works) > 1 and any(w.roams for w in each.works), len(each.works))
        )
        work = next((work for work in crowded.works if work.roams), next(reversed(crowded.works)))
        crowded.catch_up(self.now_us)
        rest = work.end - crowded.clock
        del crowded.works[work]
        work.core = core
        self._add(work, rest)

    def _push(self, work: Work, rest: float) -> None:
        self.num_events += 1
        work.end = work.core.clock + rest
        work.version += 1
        heapq.heappush(work.core.ends, (work.end, self.num_events, work.version, work))
