"""Where a GPU computes nothing, and what held back what it computed next: each microsecond has one reason.

From the work that ends a gap one walks back: to the work whose end it waited for, or to the call that launched it and from there
along the host's calls, until the gap's begin is reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from crossfade.intervals import merged, without
from crossfade.profile.doctor.build import Traced
from crossfade.profile.doctor.program import NOBODY
from crossfade.profile.traces.events import ActivityKind
from crossfade.profile.traces.roles import Role

_LATE_US = 8.0  # more than this behind all known reasons is a reason of its own
_SHORTEST_US = 1.0  # of gaps that are looked at


class Reason(StrEnum):
    """What a GPU that computes nothing waits for."""

    TRANSFER = "a collective moves"
    PEER = "a collective waits for its peers"
    COPY = "a copy between host and GPU"
    HOST_WAIT = "the host waited for the GPU, and launched the next work only then"
    PAGEABLE = "the host waited for a copy of pageable memory"
    ALLOCATOR = "the host allocated or freed GPU memory"
    LAUNCH = "the host was not yet there"
    LATE = "all was ready, and the work did not start"
    BEFORE = "the trace begins"


@dataclass(frozen=True, slots=True)
class Loss:
    """A part of a gap.

    Attributes:
        rank: whose GPU.
        start_us: when it begins, from the program's begin.
        end_us: when it ends.
        reason: what was waited for.
        work: the collective, the copy or the late work; else `NOBODY`.
        call: the host's call; else `NOBODY`.
    """

    rank: int
    start_us: float
    end_us: float
    reason: Reason
    work: int
    call: int

    @property
    def length_us(self) -> float:
        return self.end_us - self.start_us


def losses_of(traced: Traced) -> list[Loss]:
    """All losses of all ranks, by rank and time."""
    return [loss for rank in range(traced.program.num_ranks) for loss in _Walk(traced, rank).losses()]


class _Walk:
    """The gaps of one rank."""

    def __init__(self, traced: Traced, rank: int) -> None:
        self._traced = traced
        self._program = traced.program
        self._rank = rank
        self._losses: list[Loss] = []
        self._gap = (0.0, 0.0)

    def losses(self) -> list[Loss]:
        starts, ends = self._traced.starts_us, self._traced.ends_us
        computes = self._program.works_of(self._rank, ActivityKind.COMPUTE)
        own = [number for number in computes if ends[number] > starts[number]]
        if not own:
            return []
        first_of = {starts[number]: number for number in sorted(own, key=lambda number: -starts[number])}
        busy = merged((starts[number], ends[number]) for number in own)
        for gap in without([(0.0, busy[-1][1])], busy):
            if gap[1] - gap[0] >= _SHORTEST_US:
                self._gap = gap
                self._walk(first_of[gap[1]])
        return sorted(self._losses, key=lambda loss: loss.start_us)

    def _add(self, start: float, end: float, reason: Reason, *, work: int = NOBODY, call: int = NOBODY) -> None:
        start, end = max(start, self._gap[0]), min(end, self._gap[1])
        if end > start:
            self._losses.append(Loss(self._rank, start, end, reason, work, call))

    def _walk(self, number: int) -> None:
        time = self._gap[1]
        passed: set[int] = set()  # times that contradict each other can lead back to where one was
        while number != NOBODY and number not in passed and time > self._gap[0]:
            passed.add(number)
            late = self._traced.late_us[number]
            if late > _LATE_US:
                self._add(time - late, time, Reason.LATE, work=number)
                time -= late
            held = self._traced.held_by[number]
            if held == "launch":
                number, time = self._walk_host(self._program.works[number].call, time)
            elif held == "":
                break
            else:
                if held != "lane":
                    number = self._program.works[number].after[int(held)].work
                else:
                    number = self._program.before_on_lane[number]
                time = self._pass(number, time)
        self._add(self._gap[0], time, Reason.BEFORE)

    def _pass(self, number: int, time: float) -> float:
        """What the time up to here is for that a work was waited for; returns when it started."""
        if number == NOBODY:
            return time
        work, start = self._program.works[number], self._traced.starts_us[number]
        if work.kind is ActivityKind.COPY:
            self._add(start, time, Reason.COPY, work=number)
        elif work.kind is ActivityKind.COMMUNICATION:
            moves = min(max(self._traced.moves_from_us.get(work.meeting, start), start), time)
            self._add(moves, time, Reason.TRANSFER, work=number)
            self._add(start, moves, Reason.PEER, work=number)
        return start

    def _walk_host(self, call: int, time: float) -> tuple[int, float]:
        """Back along the host's calls to one that waited; returns the work that it waited for, and when that ended."""
        until = time
        starts = self._traced.call_starts_us
        while call != NOBODY and starts[call] > self._gap[0]:
            before = self._program.calls[call].after
            if before == NOBODY:
                break
            role = self._traced.calls[before].role
            waited = self._waited(before)
            if role in (Role.ALLOCATE, Role.FREE) and waited == NOBODY:
                ended = starts[before] + self._length(before)
                self._add(ended, time, Reason.LAUNCH)
                self._add(starts[before], ended, Reason.ALLOCATOR, call=before)
                time = starts[before]
            elif waited != NOBODY:
                begin = max(self._traced.ends_us[waited], starts[before])
                reason = Reason.ALLOCATOR if role is Role.FREE else Reason.HOST_WAIT
                if role is Role.LAUNCH:
                    reason = Reason.PAGEABLE
                    begin = starts[before]
                self._add(begin, time, reason, call=before)
                return (
                    (waited, begin)
                    if self._traced.program.works[waited].kind is not ActivityKind.COMPUTE
                    else (NOBODY, begin)
                )
            call = before
        self._add(max(starts[call], self._gap[0]) if call != NOBODY else self._gap[0], time, Reason.LAUNCH, call=call)
        return NOBODY, min(until, self._gap[0])

    def _length(self, call: int) -> float:
        seen = self._traced.calls[call]
        return seen.end_us - seen.start_us

    def _waited(self, call: int) -> int:
        """What a call waited for until shortly before it returned; `NOBODY` if it did not wait."""
        end = self._traced.call_starts_us[call] + self._length(call)
        for wait in self._program.calls[call].waits:
            if wait.is_of_start or self._traced.ends_us[wait.work] > max(
                self._traced.call_starts_us[call], end - 100.0
            ):
                return wait.work
        return NOBODY
