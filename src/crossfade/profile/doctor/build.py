"""Traces become a `Program`, and stay beside it: which activity each work is, and when it was seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from crossfade.errors import TraceError
from crossfade.profile.doctor.program import NOBODY, HostCall, Program, Rates, Wait, Work
from crossfade.profile.doctor.rates import Observed, amounts, demand_of, rates_of
from crossfade.profile.doctor.replay import Replay
from crossfade.profile.traces.collectives import align, match_collectives
from crossfade.profile.traces.events import Activity, ActivityKind, Call, RankTrace
from crossfade.profile.traces.launches import host_order
from crossfade.profile.traces.roles import Role
from crossfade.profile.traces.steps import step_starts
from crossfade.profile.traces.waits import EVENT_LAG_US, Waits, waits_of

LAUNCH_LAG_US = 7.0  # from a call's start to its kernel's, on an idle stream
LANE_LAG_US = 1.6  # from the end of a stream's work to the start of the next
_MOST_WORKS = 60_000
_RETURN_US = 5.0  # how long a call takes that need not wait


@dataclass(frozen=True)
class Traced:
    """A program, and what of the traces each of its parts is.

    Attributes:
        program: what can be replayed.
        traces: one for each rank, in the order of the program's ranks.
        activities: of each work.
        calls: of each host call.
        starts_us: when each work was seen to start, on one clock, from the program's begin.
        ends_us: when each was seen to end.
        call_starts_us: when each call was seen to start.
        held_by: for each work, what it started behind: "launch", "lane", the place in ``after``, or "" where nothing explains it.
        late_us: for each work, how much later than that it started.
        rates: how much works slow each other down.
        waits: of each rank, what was found of events.
        step_ends_us: when each step was seen to end.
        num_steps_left_out: how many steps the traces have besides.
    """

    program: Program
    traces: Sequence[RankTrace]
    activities: Sequence[Activity]
    calls: Sequence[Call]
    starts_us: Sequence[float]
    ends_us: Sequence[float]
    call_starts_us: Sequence[float]
    held_by: Sequence[str | int]
    late_us: Sequence[float]
    rates: Rates
    waits: Sequence[Waits]
    step_ends_us: Sequence[float]
    num_steps_left_out: int

    @cached_property
    def seen(self) -> Replay:
        """The same times as a replay has them, with the ends of calls."""
        pairs = zip(self.call_starts_us, self.calls, strict=True)
        call_ends_us = tuple(start + call.end_us - call.start_us for start, call in pairs)
        return Replay(
            tuple(self.call_starts_us),
            call_ends_us,
            tuple(self.starts_us),
            tuple(self.ends_us),
            tuple(self.step_ends_us),
        )

    @cached_property
    def moves_from_us(self) -> dict[int, float]:
        """When each meeting's last rank started."""
        moves: dict[int, float] = {}
        for number, work in enumerate(self.program.works):
            if work.meeting != NOBODY:
                moves[work.meeting] = max(moves.get(work.meeting, 0.0), self.starts_us[number])
        return moves


def build(traces: Sequence[RankTrace]) -> Traced:
    """The program of the traces' steps; of long traces, of the last steps with up to 60,000 activities.

    Raises:
        TraceError: the traces have too little to replay.
    """
    return _Builder(traces).build()


class _Builder:
    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self._traces = traces
        self._orders = [host_order(trace) for trace in traces]
        if not all(order.calls for order in self._orders):
            raise TraceError(
                "what GPUs did in the trace has other correlations than the calls of the host\n"
                "hint: give the trace as torch.profiler wrote it"
            )
        self._waits = [waits_of(trace, order) for trace, order in zip(traces, self._orders, strict=True)]
        matched = match_collectives(traces)
        self._shifts = align(traces, matched)
        self._meeting = {id(activity): number for number, parts in enumerate(matched) for _, activity in parts}
        self._sizes = [len(parts) for parts in matched]
        self._choose_steps()

    def _choose_steps(self) -> None:
        """Which steps are replayed: from which host time of each rank on, up to which."""
        starts = [step_starts(trace, order) for trace, order in zip(self._traces, self._orders, strict=True)]
        num = min(map(len, starts))
        starts = [found[:num] for found in starts]
        num_works = [0] * num
        for trace, found in zip(self._traces, starts, strict=True):
            for activity in trace.activities:
                step = bisect_right(found, activity.launched_us) - 1
                if 0 <= step < num:
                    num_works[step] += 1
        first, total = num, 0
        while first > 0 and (first == num or total + num_works[first - 1] <= _MOST_WORKS):
            first -= 1
            total += num_works[first]
        self._starts = [found[first:] for found in starts]
        self._num_steps = num - first
        self._num_left_out = first

    def build(self) -> Traced:
        self._activities: list[Activity] = []
        self._calls: list[Call] = []
        self._ranks: list[int] = []
        self._place: dict[int, int] = {}
        self._call_place: dict[int, int] = {}
        begin = min(found[0] + shift for found, shift in zip(self._starts, self._shifts, strict=True))
        if self._num_left_out == 0:
            begin = min(
                trace.activities[0].start_us + shift for trace, shift in zip(self._traces, self._shifts, strict=True)
            )
            begin = min(
                begin, *(order.calls[0].start_us + s for order, s in zip(self._orders, self._shifts, strict=True))
            )
        self._begin = begin
        self._collect()
        if not self._activities:
            raise TraceError("the trace has no activities in its steps\nhint: record at least two steps of the program")
        observed = self._observe()
        rates = rates_of(observed, len(self._traces))
        speeds = [
            rates.communication
            if one.kind is ActivityKind.COMMUNICATION
            else rates.compute.get(one.key, rates.other_compute)
            for one in observed
        ]
        alone = amounts(observed, speeds, len(self._traces))
        calls = self._host_calls()
        works, held_by, late = self._works(observed, speeds, alone)
        step_ends = [0.0] * self._num_steps
        for work, one in zip(works, observed, strict=True):
            step_ends[work.step] = max(step_ends[work.step], one.end_us)
        return Traced(
            Program(tuple(calls), tuple(works), len(self._traces), self._num_steps),
            self._traces,
            self._activities,
            self._calls,
            [one.start_us for one in observed],
            [one.end_us for one in observed],
            [self._on_clock(self._call_ranks[place], call.start_us) for place, call in enumerate(self._calls)],
            held_by,
            late,
            rates,
            self._waits,
            list(accumulate(step_ends, max)),
            self._num_left_out,
        )

    def _collect(self) -> None:
        """Numbers the activities and calls of the chosen steps."""
        self._call_ranks: list[int] = []
        for rank, (trace, order) in enumerate(zip(self._traces, self._orders, strict=True)):
            first = self._starts[rank][0] if self._num_left_out else float("-inf")
            for activity in trace.activities:
                if activity.launched_us >= first:
                    self._place[id(activity)] = len(self._activities)
                    self._activities.append(activity)
                    self._ranks.append(rank)
            for call in order.calls:
                if call.start_us >= first:
                    self._call_place[id(call)] = len(self._calls)
                    self._calls.append(call)
                    self._call_ranks.append(rank)

    def _on_clock(self, rank: int, time_us: float) -> float:
        return time_us + self._shifts[rank] - self._begin

    def _step_at(self, rank: int, time_us: float) -> int:
        return max(bisect_right(self._starts[rank], time_us) - 1, 0)

    def _observe(self) -> list[Observed]:
        whole: dict[int, int] = {}
        for activity in self._activities:
            meeting = self._meeting.get(id(activity), NOBODY)
            whole[meeting] = whole.get(meeting, 0) + 1
        observed = []
        for activity, rank in zip(self._activities, self._ranks, strict=True):
            meeting = self._meeting.get(id(activity), NOBODY)
            if meeting != NOBODY and whole[meeting] < self._sizes[meeting]:
                meeting = NOBODY  # a part of it lies outside the chosen steps
            demand = demand_of(activity.kind, activity.num_blocks, self._traces[rank].num_sms)
            start, end = (self._on_clock(rank, time) for time in (activity.start_us, activity.end_us))
            key = activity.name, activity.num_blocks
            observed.append(Observed(activity.kind, rank, key, start, end, demand, meeting))
        return observed

    def _host_calls(self) -> list[HostCall]:
        found = []
        for rank, order in enumerate(self._orders):
            returns = self._waits[rank].returns
            events = np.searchsorted(
                self._traces[rank].host_events_us, [call.start_us for call in order.calls], side="right"
            )
            for place, (call, before) in enumerate(zip(order.calls, order.before, strict=True)):
                if id(call) not in self._call_place:
                    continue
                after = self._call_place.get(id(order.calls[before]), NOBODY) if before >= 0 else NOBODY
                ended = order.calls[before].end_us if after != NOBODY else self._begin - self._shifts[rank]
                waits = tuple(self._return(call, one) for one in returns.get(call, ()) if id(one) in self._place)
                own = call.end_us - call.start_us
                ended_us = max((one.end_us for one in returns.get(call, ())), default=0.0)
                if waits and call.role is Role.FREE:
                    own = max(call.end_us - max(call.start_us, ended_us), 0.0)
                elif waits and ended_us > call.start_us:  # else it found nothing to wait for, and took its own time
                    own = min(own, _RETURN_US)
                gap = max(call.start_us - ended, 0.0)
                num_events = 1 if after == NOBODY else max(int(events[place] - events[before]), 1)
                found.append(HostCall(rank, after, gap, own, waits, self._step_at(rank, call.start_us), num_events))
        return found

    def _return(self, call: Call, activity: Activity) -> Wait:
        number = self._place[id(activity)]
        if call.role is Role.LAUNCH and activity in call.activities:
            return Wait(number, call.end_us - activity.start_us, is_of_start=True)
        if call.role is Role.FREE:
            return Wait(number, max(call.end_us - activity.end_us, 0.0) if activity.end_us > call.start_us else 0.0)
        is_binding = activity.end_us > call.start_us
        return Wait(number, max(call.end_us - activity.end_us, 0.0) if is_binding else _RETURN_US)

    def _works(
        self, observed: Sequence[Observed], speeds: Sequence[float], alone: Sequence[float]
    ) -> tuple[list[Work], list[str | int], list[float]]:
        works: list[Work] = []
        held_by: list[str | int] = []
        late: list[float] = []
        lanes: dict[tuple[int, tuple[int, int]], int] = {}
        last: dict[int, int] = {}
        for number, (activity, one) in enumerate(zip(self._activities, observed, strict=True)):
            lane = lanes.setdefault((one.rank, activity.lane), len(lanes))
            waits = self._waits[one.rank]
            sources = [source for source in waits.events.get(activity, []) if id(source) in self._place]
            after = [self._place[id(source)] for source in sources]
            bounds: list[tuple[float, float, str | int]] = []  # a time, the usual lag behind it, what it is
            call = self._call_place.get(id(activity.call), NOBODY) if activity.call is not None else NOBODY
            if call != NOBODY and activity.call is not None:
                bounds.append((self._on_clock(one.rank, activity.call.start_us), LAUNCH_LAG_US, "launch"))
            if lane in last:
                bounds.append((observed[last[lane]].end_us, LANE_LAG_US, "lane"))
            bounds += [(observed[source].end_us, EVENT_LAG_US, place) for place, source in enumerate(after)]
            last[lane] = number
            lags, what, lateness = _lags(one.start_us, bounds)
            held_by.append(what)
            late.append(lateness)
            works.append(
                Work(
                    one.kind,
                    one.rank,
                    lane,
                    call,
                    lags.get("launch", one.start_us),
                    lags.get("lane", LANE_LAG_US),
                    tuple(
                        Wait(after[place], lags[place], is_order=(activity, source) in waits.in_order)
                        for place, source in enumerate(sources)
                    ),
                    alone[number],
                    one.demand,
                    speeds[number],
                    one.meeting,
                    self._step_at(one.rank, activity.launched_us),
                )
            )
        return works, held_by, late


def _lags(
    start_us: float, bounds: Sequence[tuple[float, float, str | int]]
) -> tuple[dict[str | int, float], str | int, float]:
    """How long after each of its bounds a work starts, which one it started behind, and how much later than usual.

    The one that binds has the lag that was seen; the others have the usual one, or less where the work started sooner.
    """
    if not bounds:
        return {}, "", 0.0
    time, usual, binding = max(bounds, key=lambda bound: bound[0] + bound[1])
    lags: dict[str | int, float] = {what: min(lag, max(start_us - at, 0.0)) for at, lag, what in bounds}
    lags[binding] = max(start_us - time, 0.0)
    return lags, binding, max(start_us - time - usual, 0.0)
