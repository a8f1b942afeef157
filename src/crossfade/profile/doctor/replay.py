"""Replays a `Program`: an event-driven simulation with rates.

Work that runs is slowed down by what runs beside it, so at each start and end the remaining amounts are brought up to date and
the ends are computed anew. A longest path with fixed lengths cannot lengthen a kernel that a change puts beside a collective, and
promises too much.

- Kernels of one GPU share its multiprocessors: where their demands exceed 1, each runs at 1 / (sum of the demands).
- A kernel beside a resident collective runs at its own rate; a collective spins on its multiprocessors from its start on, while it
  waits for its peers too.
- A collective moves once its last rank has started, at the slowest of its ranks' rates; collectives of one rank share the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from statistics import median

from crossfade.errors import TraceError
from crossfade.profile.doctor.program import NOBODY, Program, Work
from crossfade.profile.traces.events import ActivityKind

_CALL, _RETURN, _START, _END = range(4)
_A_WHOLE_STEP = 0.3  # of the other steps' length
_COMPUTE, _COMMUNICATION = ActivityKind.COMPUTE, ActivityKind.COMMUNICATION


@dataclass(frozen=True)
class Replay:
    """When everything ran, in microseconds from the program's begin, in the order of the program's lists."""

    call_starts_us: tuple[float, ...]
    call_ends_us: tuple[float, ...]
    starts_us: tuple[float, ...]
    ends_us: tuple[float, ...]
    step_ends_us: tuple[float, ...]

    @property
    def end_us(self) -> float:
        return max(self.ends_us, default=0.0)


def step_lengths(step_ends_us: Sequence[float]) -> list[float]:
    """How long steps take, but the first, which has no end before it, and what is left of one at the trace's end."""
    if len(step_ends_us) < 2:
        return [max(step_ends_us)]
    lengths = [later - earlier for earlier, later in pairwise(step_ends_us)]
    return lengths[:-1] if len(lengths) > 1 and lengths[-1] < _A_WHOLE_STEP * median(lengths[:-1]) else lengths


class WaitsForItself(TraceError):
    """A program whose works and calls wait for each other in a circle."""


def speed_of_kernel(rate: float, demand: float, demand_of_all: float, *, is_beside: bool) -> float:
    """How fast a kernel runs, in parts of alone. ``is_beside``: a collective is resident."""
    shared = 1.0 / demand_of_all if demand_of_all > 1.0 and demand > 0.0 else 1.0
    return shared * (rate if is_beside else 1.0)


def speed_of_collective(rate: float, num_moving: int, *, is_beside: bool) -> float:
    """How fast a collective moves on one rank, in parts of alone. ``is_beside``: something computes."""
    return (rate if is_beside else 1.0) / max(num_moving, 1)


def replay(program: Program) -> Replay:
    """When each call and each work of a program would run.

    Raises:
        WaitsForItself: of a changed program: the change cannot be made.
    """
    return _Simulation(program).run()


class _Gpu:
    """What runs on one rank's GPU: kernels, and collectives that are resident."""

    def __init__(self) -> None:
        self.kernels: set[int] = set()
        self.resident: set[int] = set()
        self.num_moving = 0
        self.demand = 0.0


class _Simulation:
    def __init__(self, program: Program) -> None:
        self._works = program.works
        self._calls = program.calls
        self._now = 0.0
        self._queue: list[tuple[float, int, int, int]] = []  # time, what, of which, which version
        self._call_starts = [0.0] * len(program.calls)
        self._call_ends = [0.0] * len(program.calls)
        self._starts = [-1.0] * len(program.works)
        self._ends = [-1.0] * len(program.works)
        self._gpus = [_Gpu() for _ in range(program.num_ranks)]
        self._left = [work.amount_us for work in program.works]  # of a meeting: only its first work's counts
        self._since = [0.0] * len(program.works)
        self._speed = [0.0] * len(program.works)
        self._version = [0] * len(program.works)
        self._num_steps = program.num_steps
        self._connect(program)

    def _connect(self, program: Program) -> None:
        """Who goes on when something has started or ended."""
        num_calls, num_works = len(program.calls), len(program.works)
        self._next_calls: list[list[int]] = [[] for _ in range(num_calls)]
        self._launched: list[list[int]] = [[] for _ in range(num_calls)]
        self._waiting_calls: list[list[tuple[int, float]]] = [[] for _ in range(num_works)]
        self._waiting_for_start: list[list[tuple[int, float]]] = [[] for _ in range(num_works)]
        self._followers: list[list[tuple[int, float]]] = [[] for _ in range(num_works)]
        self._num_open = [0] * num_works
        self._ready = [0.0] * num_works
        self._num_waits = [1 + len(call.waits) for call in program.calls]  # its own length counts as one
        self._meetings: dict[int, list[int]] = {}
        last: dict[int, int] = {}
        for number, call in enumerate(program.calls):
            if call.after == NOBODY:
                heappush(self._queue, (call.gap_us, _CALL, number, 0))
            else:
                self._next_calls[call.after].append(number)
            for wait in call.waits:
                waiting = self._waiting_for_start if wait.is_of_start else self._waiting_calls
                waiting[wait.work].append((number, wait.lag_us))
        for number, work in enumerate(program.works):
            self._num_open[number] = 1 + len(work.after)
            if work.call == NOBODY:
                self._num_open[number] -= 1
                self._ready[number] = work.launch_lag_us
            else:
                self._launched[work.call].append(number)
            if work.lane in last:
                self._num_open[number] += 1
                self._followers[last[work.lane]].append((number, work.lane_lag_us))
            last[work.lane] = number
            for wait in work.after:
                self._followers[wait.work].append((number, wait.lag_us))
            if work.meeting != NOBODY:
                self._meetings.setdefault(work.meeting, []).append(number)
            if not self._num_open[number]:
                heappush(self._queue, (max(self._ready[number], 0.0), _START, number, 0))

    def run(self) -> Replay:
        steps = [0.0] * self._num_steps
        num_ended = 0
        handlers = (self._begin_call, self._end_call, self._start, self._end)
        while self._queue:
            self._now, what, number, version = heappop(self._queue)
            if what == _END:
                if version != self._version[number]:
                    continue
                num_ended += len(self._parts(number))
            handlers[what](number)
        if num_ended < len(self._works):
            num_stuck = len(self._works) - num_ended
            raise WaitsForItself(
                f"{num_stuck} activities wait for each other in a circle: the trace's times contradict each other, or this is a bug"
                " in crossfade"
            )
        for work, end in zip(self._works, self._ends, strict=True):
            steps[work.step] = max(steps[work.step], end)
        return Replay(
            tuple(self._call_starts),
            tuple(self._call_ends),
            tuple(self._starts),
            tuple(self._ends),
            tuple(accumulate(steps, max)),
        )

    def _begin_call(self, number: int) -> None:
        call = self._calls[number]
        self._call_starts[number] = self._now
        self._call_ends[number] = self._now + call.own_us
        for work in self._launched[number]:
            self._allow(work, self._now + self._works[work].launch_lag_us)
        self._let_return(number, self._now + call.own_us)

    def _let_return(self, number: int, time: float) -> None:
        self._call_ends[number] = max(self._call_ends[number], time)
        self._num_waits[number] -= 1
        if not self._num_waits[number]:
            heappush(self._queue, (max(self._call_ends[number], self._now), _RETURN, number, 0))

    def _end_call(self, number: int) -> None:
        self._call_ends[number] = self._now
        for following in self._next_calls[number]:
            heappush(self._queue, (self._now + self._calls[following].gap_us, _CALL, following, 0))

    def _allow(self, number: int, time: float) -> None:
        """One of those that a work waits for is done; it holds the work until a time."""
        self._ready[number] = max(self._ready[number], time)
        self._num_open[number] -= 1
        if not self._num_open[number]:
            heappush(self._queue, (max(self._ready[number], self._now), _START, number, 0))

    def _start(self, number: int) -> None:
        work = self._works[number]
        self._starts[number] = self._since[number] = self._now
        for call, lag in self._waiting_for_start[number]:
            self._let_return(call, self._now + lag)
        gpu = self._gpus[work.rank]
        if work.kind is _COMPUTE:
            gpu.kernels.add(number)
            gpu.demand += work.demand
            self._set_speeds([work.rank])
        elif work.kind is _COMMUNICATION:
            gpu.resident.add(number)
            parts = self._parts(number)
            ranks = [work.rank]
            if all(self._starts[part] >= 0 for part in parts):
                ranks = [self._works[part].rank for part in parts]
                self._since[parts[0]] = self._now
                for rank in ranks:
                    self._gpus[rank].num_moving += 1
                self._speed[parts[0]] = -1.0  # moving, its speed not known yet
            self._set_speeds(ranks)
        else:
            heappush(self._queue, (self._now + work.amount_us, _END, number, self._version[number]))

    def _end(self, number: int) -> None:
        work = self._works[number]
        parts = self._parts(number)
        for part in parts:
            self._ends[part] = self._now
            self._leave(part, self._works[part])
        if work.kind is not ActivityKind.COPY:
            self._set_speeds([self._works[part].rank for part in parts])
        for part in parts:
            for following, lag in self._followers[part]:
                self._allow(following, self._now + lag)
            for call, lag in self._waiting_calls[part]:
                self._let_return(call, self._now + lag)

    def _parts(self, number: int) -> list[int]:
        """The parts of all ranks of a collective; of other work, itself."""
        meeting = self._works[number].meeting
        return [number] if meeting == NOBODY else self._meetings[meeting]

    def _leave(self, number: int, work: Work) -> None:
        gpu = self._gpus[work.rank]
        if work.kind is _COMPUTE:
            gpu.kernels.discard(number)
            gpu.demand = gpu.demand - work.demand if gpu.kernels else 0.0
        elif work.kind is _COMMUNICATION:
            gpu.resident.discard(number)
            gpu.num_moving -= 1

    def _set_speeds(self, ranks: list[int]) -> None:
        """Brings all that runs on these GPUs up to date."""
        for rank in ranks:
            gpu = self._gpus[rank]
            is_beside = bool(gpu.resident)
            for number in gpu.kernels:
                work = self._works[number]
                self._run_at(number, speed_of_kernel(work.rate, work.demand, gpu.demand, is_beside=is_beside))
            for number in gpu.resident:
                self._move(number)

    def _move(self, number: int) -> None:
        parts = self._parts(number)
        first = parts[0]
        if self._speed[first] == 0.0:
            return  # a peer is still missing
        slowest = 1.0
        for part in parts:
            there = self._works[part]
            gpu = self._gpus[there.rank]
            speed = speed_of_collective(there.rate, gpu.num_moving, is_beside=bool(gpu.kernels))
            slowest = min(slowest, speed)
        self._run_at(first, slowest)

    def _run_at(self, number: int, speed: float) -> None:
        if self._speed[number] == speed:
            return
        if self._speed[number] > 0.0:
            self._left[number] -= self._speed[number] * (self._now - self._since[number])
        self._since[number] = self._now
        self._speed[number] = speed
        self._version[number] += 1
        end = self._now + max(self._left[number], 0.0) / speed
        heappush(self._queue, (end, _END, number, self._version[number]))
