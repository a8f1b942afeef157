"""The cores of hosts, shared by the work of many parties, as an operating system shares them.

A piece of work starts on the core of its host that has least to do. The k pieces on a core run at the rate 1 / k each. They stay
where they are: a core that has become idle takes one over from a core with several only after ``balance_us``, for kernels look
for such work seldom. Work that *roams* (many short stretches, each of which starts on an idle core if there is one) is
taken over at once.

Each core has a virtual clock that runs at its rate, so that a piece of work of w microseconds ends when that clock has gone
on by w, whoever comes and goes meanwhile. A change costs O(log n), however many cores and hosts there are; only where a core takes
work over, it looks at those of its host that have several pieces.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Work:
    """One piece of work on the cores."""

    done: Callable[[], None]  # called, with the cores' clock at its end, when the work is over
    factor: float  # how much longer it takes than alone
    roams: bool  # whether an idle core takes it over at once
    core: _Core  # where it is
    end: float = 0.0  # on the core's virtual clock
    version: int = 0  # how often ``end`` changed; an entry of a heap with another version is out of date


@dataclass(slots=True, eq=False)
class _Core:
    number: int  # among all cores
    host: _Host
    works: dict[Work, None] = field(default_factory=dict)  # what runs on it, in the order in which it came
    clock: float = 0.0  # the virtual clock, right at ``at_us``
    at_us: float = 0.0
    idle_since_us: float = 0.0  # when it had nothing to do any more
    ends: list[tuple[float, int, int, Work]] = field(default_factory=list)  # a heap of (end, number, version, work)
    version: int = 0  # how often it changed; an entry of a heap with another version is out of date
    slowness: float = 0.0  # of a lane: how many times as long each piece takes as alone
    num_sharing: float = 1.0  # by how much the virtual clock is slower than the real one

    def catch_up(self, now_us: float) -> None:
        """Brings the virtual clock to the real one."""
        self.clock += (now_us - self.at_us) / self.num_sharing
        self.at_us = now_us

    def next_end_us(self) -> float:
        """When the next piece of work ends if nothing changes before; there is one."""
        while self.ends[0][2] != self.ends[0][3].version:
            heapq.heappop(self.ends)
        return self.at_us + max(0.0, self.ends[0][0] - self.clock) * self.num_sharing


Lane = _Core
"""What `Cores.new_lane` gives."""


@dataclass(slots=True, eq=False)
class _Host:
    num_cores: int
    cores: dict[int, _Core] = field(default_factory=dict)  # those that have ever had work, by number
    idle: dict[_Core, None] = field(default_factory=dict)  # those without work, in the order in which they became so
    crowded: dict[_Core, None] = field(default_factory=dict)  # those with several pieces
    # by how many pieces, heaps of the numbers of cores that have or had so many. Unless all cores have work, only the idle count.
    loads: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    is_full: bool = False  # whether each core has had work

    def note(self, core: _Core) -> None:
        """A core has one piece more, or one less, and counts."""
        heapq.heappush(self.loads[len(core.works)], core.number)

    def least_loaded(self) -> _Core | None:
        """Of the cores that have ever had work, the one that has least now; none where there is another core that had none yet."""
        for num in sorted(self.loads):
            numbers = self.loads[num]
            while numbers:
                core = self.cores[numbers[0]]
                if len(core.works) == num:
                    return core
                heapq.heappop(numbers)
            if not self.is_full:
                break
        return None


@dataclass(slots=True)
class Cores:
    """The cores of all hosts, on one clock."""

    num_cores: int  # of a host
    balance_us: float = 0.0  # how long a core is idle before it takes work over from another one
    of_hosts: Sequence[int] = ()  # the cores of each host, where they are known one by one
    now_us: float = 0.0  # the real clock
    num_events: int = 0  # entries that the heaps have seen, a measure of the work done here
    _hosts: dict[int, _Host] = field(default_factory=dict)
    _num_cores_used: int = 0
    # a heap of (time, core's number, version, core): when a piece of work ends on a core, or an idle core takes one over.
    _next: list[tuple[float, int, int, _Core]] = field(default_factory=list)

    def start(
        self, work_us: float, done: Callable[[], None], factor: float = 1.0, *, roams: bool = False, host: int = 0
    ) -> Work:
        """Starts a piece of work that takes ``work_us * factor`` on a core of its own."""
        on = self._hosts.get(host) or self._new_host(host)
        work = Work(done, factor, roams, on.least_loaded() or self._new_core(on))
        self._add(work, work_us * factor)
        return work

    def new_lane(self) -> Lane:
        """Something besides the cores on which any number of pieces go on at once, all equally slowed down."""
        lane = _Core(self._num_cores_used, _Host(0), at_us=self.now_us, slowness=1.0)
        self._num_cores_used += 1
        return lane

    def start_on(self, lane: Lane, work_us: float, done: Callable[[], None]) -> None:
        """Starts a piece of work on a lane."""
        self._add(Work(done, 1.0, False, lane), work_us)

    def slow_lane(self, lane: Lane, slowness: float) -> None:
        """From now on, all that is on the lane takes so many times as long as alone."""
        if slowness != lane.slowness:
            lane.catch_up(self.now_us)
            lane.slowness = slowness
            self._changed(lane)

    def slow_down(self, work: Work, factor: float) -> None:
        """From now on, what is left of the work takes ``factor`` times as long as alone."""
        if factor != work.factor and work in work.core.works:
            work.core.catch_up(self.now_us)
            self._push(work, (work.end - work.core.clock) * factor / work.factor)
            work.factor = factor
            self._changed(work.core)

    def next_end_us(self) -> float:
        """When work ends, or goes to another core, if nothing changes before; infinity when neither will be."""
        while self._next:
            time_us, _, version, core = self._next[0]
            if version == core.version and (core.works or core.host.crowded):
                return time_us
            heapq.heappop(self._next)
        return math.inf

    def advance(self, to_us: float) -> None:
        """Moves the clock, at most to ``next_end_us``."""
        self.now_us = to_us

    def finish_next(self) -> None:
        """Moves the clock to ``next_end_us``, and ends the piece of work, or lets it go to the other core."""
        self.now_us = self.next_end_us()
        core = heapq.heappop(self._next)[3]
        if not core.works:
            self._take_over(core)
            return
        core.catch_up(self.now_us)
        work = heapq.heappop(core.ends)[3]
        core.clock = max(core.clock, work.end)
        self._remove(work)
        crowded = core.host.crowded
        if crowded and not core.works and any(other.roams for each in crowded for other in each.works):
            self._take_over(core)
        work.done()

    def _new_host(self, number: int) -> _Host:
        host = self._hosts[number] = _Host(self.of_hosts[number] if self.of_hosts else self.num_cores)
        return host

    def _new_core(self, host: _Host) -> _Core:
        core = host.cores[self._num_cores_used] = _Core(self._num_cores_used, host, at_us=self.now_us)
        self._num_cores_used += 1
        if len(host.cores) == host.num_cores:
            host.is_full = True
            for each in host.cores.values():
                host.note(each)
        return core

    def _add(self, work: Work, rest: float) -> None:
        core, host = work.core, work.core.host
        core.catch_up(self.now_us)
        core.works[work] = None
        if len(core.works) == 1:
            host.idle.pop(core, None)
        elif not core.slowness:
            host.crowded[core] = None
        if host.is_full:
            host.note(core)
        self._push(work, rest)
        self._changed(core)

    def _remove(self, work: Work) -> None:
        """Its core's clock is at the real one."""
        core, host = work.core, work.core.host
        del core.works[work]
        work.version += 1
        if not core.works and not core.slowness:
            core.idle_since_us = self.now_us
            host.idle[core] = None
            host.note(core)
        elif host.is_full:
            if len(core.works) == 1:
                del host.crowded[core]
            host.note(core)
        self._changed(core)

    def _take_over(self, core: _Core) -> None:
        """An idle core gets work from the most crowded one of its host: what roams, else what came last."""
        crowded = max(
            core.host.crowded, key=lambda each: (any(w.roams for w in each.works), len(each.works), -each.number)
        )
        work = next((work for work in crowded.works if work.roams), next(reversed(crowded.works)))
        crowded.catch_up(self.now_us)
        rest = work.end - crowded.clock
        self._remove(work)
        work.core = core
        self._add(work, rest)

    def _push(self, work: Work, rest: float) -> None:
        self.num_events += 1
        work.end = work.core.clock + rest
        work.version += 1
        heapq.heappush(work.core.ends, (work.end, self.num_events, work.version, work))

    def _changed(self, core: _Core) -> None:
        """Enters anew when something happens on a core next."""
        core.version += 1
        core.num_sharing = core.slowness or len(core.works) or 1
        if core.works:
            heapq.heappush(self._next, (core.next_end_us(), core.number, core.version, core))
        host = core.host
        if host.crowded and host.idle:
            self._enter_take_over(next(iter(host.idle)))

    def _enter_take_over(self, core: _Core) -> None:
        """The core that has been idle longest looks for work of its host's other cores, of which some have several pieces."""
        time_us = max(self.now_us, core.idle_since_us + self.balance_us)
        heapq.heappush(self._next, (time_us, core.number, core.version, core))
