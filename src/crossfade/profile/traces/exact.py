"""Which event a call records or waits for, and on which stream: exact, where `crossfade.record` wrote the trace.

Each of the record's entries belongs to one call of the trace, by thread, role and time: records and waits are reported just after
their call, synchronisations just before it. Entries name streams by handles, activities by numbers. The record says which is which,
and so do ``cuda_sync`` events; of a stream that has neither, what is launched next to its calls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from typing import NamedTuple

from crossfade.profile.traces.events import Activity, Call, RankTrace
from crossfade.profile.traces.launches import HostOrder
from crossfade.profile.traces.record import Entry
from crossfade.profile.traces.roles import Role

_SYNCHRONISATIONS = {Role.SYNC_STREAM, Role.SYNC_EVENT}

Lane = tuple[int, int]


class Edge(NamedTuple):
    """What a wait makes wait for what: no target or no sources where the trace has no such activity."""

    target: Activity | None
    sources: tuple[Activity, ...]


class ExactEvents:
    """Of one rank. Knows no call of a trace without a record."""

    def __init__(self, trace: RankTrace, order: HostOrder) -> None:
        self.edges: dict[Call, Edge] = {}
        """For each wait for an event that is known."""
        self.returns: dict[Call, tuple[Activity, ...]] = {}
        """For each synchronisation that is known, the activities that it waits for."""
        self.records: set[Call] = set()
        """The records of events that are known."""
        if trace.record is None or not trace.activities:
            return
        self._order = order
        entries = match(trace)
        self._lane_of, self._idle = _lanes_of(trace, order, entries)
        self._fronts: dict[int, tuple[Activity, ...]] = {}  # of streams that wait, and have launched nothing since
        self._resolve(entries)

    def _resolve(self, entries: list[tuple[Call, Entry]]) -> None:
        recorded: dict[int, tuple[Activity, ...]] = {}  # by event, what lies before its record
        for call, entry in entries:
            if entry.role is Role.RECORD:
                self.records.add(call)
                if self._is_known(entry.stream):
                    recorded[entry.event] = self._behind(entry.stream, call.start_us)
                else:
                    recorded.pop(entry.event, None)
            elif entry.role is Role.WAIT_EVENT and entry.event in recorded:
                sources = recorded[entry.event]
                behind = self._behind(entry.stream, call.start_us)
                self._fronts[entry.stream] = _last_of_each((*behind, *sources))
                if entry.stream in self._lane_of:
                    self.edges[call] = Edge(self._after(self._lane_of[entry.stream], call.start_us), sources)
            elif entry.role is Role.SYNC_EVENT and entry.event in recorded:
                self.returns[call] = recorded[entry.event]
            elif entry.role is Role.SYNC_STREAM and self._is_known(entry.stream):
                self.returns[call] = self._behind(entry.stream, call.start_us)

    def _is_known(self, stream: int) -> bool:
        """Whether it is known what a stream does, if it does anything."""
        return stream in self._lane_of or stream in self._idle or stream in self._fronts

    def _behind(self, stream: int, time_us: float) -> tuple[Activity, ...]:
        """What a stream has to do before it gets to what is enqueued at a time: its last work, and what it waits for since."""
        lane = self._lane_of.get(stream)
        last = self._before(lane, time_us) if lane is not None else None
        front = self._fronts.get(stream, ())
        return front if last is None or last in front else (last,)

    def _before(self, lane: Lane, time_us: float) -> Activity | None:
        """The last activity that was launched on a stream before a time."""
        place = bisect_left(self._order.launched_us[lane], time_us) - 1
        return self._order.lanes[lane][place] if place >= 0 else None

    def _after(self, lane: Lane, time_us: float) -> Activity | None:
        place = bisect_right(self._order.launched_us[lane], time_us)
        return self._order.lanes[lane][place] if place < len(self._order.launched_us[lane]) else None


def _last_of_each(activities: tuple[Activity, ...]) -> tuple[Activity, ...]:
    """Each stream's last one of these: it is behind the others."""
    last: dict[Lane, Activity] = {}
    for activity in activities:
        last[activity.lane] = max(last.get(activity.lane, activity), activity, key=lambda one: one.start_us)
    return tuple(last.values())


def match(trace: RankTrace) -> list[tuple[Call, Entry]]:
    """Each entry's call: the thread's last one of that role that began before, or after it for a synchronisation.

    Python is called just behind a call, or just before, so a few microseconds lie between an entry and any other call. A call of
    which there are two entries keeps the first.
    """
    assert trace.record is not None, "asked for with a record only"
    calls: dict[tuple[int, Role], list[Call]] = defaultdict(list)
    for call in trace.calls:
        calls[call.thread, call.role].append(call)
    starts = {key: [call.start_us for call in found] for key, found in calls.items()}
    matched: dict[Call, Entry] = {}
    for entry in trace.record.entries:
        key = trace.threads.get(entry.thread, -1), entry.role
        if key not in starts:
            continue
        time_us = (entry.time_ns - trace.origin_ns) / 1e3
        is_before = entry.role in _SYNCHRONISATIONS
        place = bisect_left(starts[key], time_us) - (not is_before)
        if 0 <= place < len(starts[key]):
            matched.setdefault(calls[key][place], entry)
    return sorted(matched.items(), key=lambda pair: pair[0].start_us)


def _lanes_of(
    trace: RankTrace, order: HostOrder, entries: list[tuple[Call, Entry]]
) -> tuple[dict[int, Lane], set[int]]:
    """Which lane each handle of a stream is: what most of its calls say. And which handles are of streams without activities.

    Where neither the record nor a ``cuda_sync`` event says it, a call that records an event speaks for the stream that its thread
    launched on last, a wait for the one that it launches on next.
    """
    assert trace.record is not None, "asked for with a record only"
    outright: dict[int, Counter[Lane]] = defaultdict(Counter)
    nearby: dict[int, Counter[Lane]] = defaultdict(Counter)
    devices = {stream: device for device, stream in order.lanes}
    idle = {handle for handle, number in trace.record.streams if number not in devices}
    launches: dict[int, list[Call]] = defaultdict(list)
    for call in order.calls:
        if call.activities:
            launches[call.thread].append(call)
    starts = {thread: [call.start_us for call in found] for thread, found in launches.items()}
    for call, entry in entries:
        if entry.role is Role.SYNC_EVENT:
            continue
        stream = trace.sync_streams.get(call.correlation)
        if stream in devices:
            outright[entry.stream][devices[stream], stream] += 1
        elif stream is not None and stream > 0:
            idle.add(entry.stream)
        found = launches[call.thread]
        place = bisect_right(starts.get(call.thread, []), call.start_us)
        place -= entry.role is not Role.WAIT_EVENT
        if 0 <= place < len(found):
            nearby[entry.stream][found[place].activities[0].lane] += 1
    voted = {**{stream: votes for stream, votes in nearby.items() if stream not in idle}, **outright}
    lanes = {stream: votes.most_common(1)[0][0] for stream, votes in voted.items()}
    lanes |= {handle: (devices[number], number) for handle, number in trace.record.streams if number in devices}
    return lanes, idle - lanes.keys()
