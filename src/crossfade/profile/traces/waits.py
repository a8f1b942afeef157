"""What waits for what on the GPU and on the host, as far as a trace's structure tells.

A plain trace has no stream and no event on any call. What follows from its structure was found in traces of torch 2.11:

- Inside a collective's ``record_param_comms``, before it is launched, a wait for an event means that it runs on its group's own
  stream, behind the caller's; without one it runs on the caller's stream.
- ``Work.wait()`` is a ``record_param_comms`` of the name "wait" around one wait for an event; it does not say for which work.
- A record and a wait outside of both order two streams: that of the launch before, and that of the launch after.
- DDP waits for its buckets by bare waits, without a record.
- Collectives of one communicator run in the order of their launches, also on streams of their callers: NCCL sees to that.

An edge that the activities' own times contradict is left out. Of calls that `crossfade.record` recorded too, event and stream are
known, and nothing is inferred.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from crossfade.profile.traces.collectives import group_of, is_ordered
from crossfade.profile.traces.default_stream import implicit_waits
from crossfade.profile.traces.events import Activity, ActivityKind, Call, CollectiveCall, RankTrace
from crossfade.profile.traces.exact import ExactEvents
from crossfade.profile.traces.launches import HostOrder
from crossfade.profile.traces.roles import Role

EVENT_LAG_US = (
    3.0  # from the end of a work to the start of what waits for its event; 5.2 at the 95th percentile on H200
)
_NEAR_US = 12.0  # so soon after an end, what starts was waiting for it
_GRAPH_US = 200.0  # the same of the first work of a CUDA graph
_UNEXPLAINED_US = 30.0  # a work that starts so long after all known reasons had another one
_CLOCK_US = 2.0  # by so much may an edge seem to go backwards
_RETURN_US = 60.0  # a call that waited returns so soon after the end of what it waited for, at the latest
_LONG_CALL_US = 30.0
_MOST_OUTSTANDING = 64
_QUEUE = 500  # so many launches are under way where a launch waits for room


@dataclass
class Waits:
    """What was found."""

    # for each activity, those of other streams that it waits for
    events: dict[Activity, list[Activity]] = field(default_factory=dict)
    # for each call that the host waits in, the activities without which it does not return
    returns: dict[Call, list[Activity]] = field(default_factory=dict)
    # for each collective, whether it runs beside its caller's stream
    is_on_own_stream: dict[Activity, bool] = field(default_factory=dict)
    # for each collective on its own stream, the call with which the caller's stream begins to wait for it
    waited_at: dict[Activity, Call] = field(default_factory=dict)
    # pairs of an activity and one of ``events`` that it waits for without an event: one of both is on the default stream
    implicit: set[tuple[Activity, Activity]] = field(default_factory=set)
    # the same of two collectives of one communicator
    in_order: set[tuple[Activity, Activity]] = field(default_factory=set)


def waits_of(trace: RankTrace, order: HostOrder) -> Waits:
    """Finds what waits for what in one rank's trace."""
    waits = Waits()
    exact = ExactEvents(trace, order)
    _Events(trace, order, waits, exact).find()
    _find_returns(order, waits, exact)
    for call in order.calls:
        if len(call.activities) > 1:
            _within_graph(call.activities, waits)
    for target, source in list(implicit_waits(order, waits.events, trace.num_sms)):
        if source not in waits.events.get(target, ()) and source.end_us <= target.start_us + _CLOCK_US:
            waits.events.setdefault(target, []).append(source)
            waits.implicit.add((target, source))
    return waits


class _OpenWait(NamedTuple):
    call: Call
    scope: CollectiveCall | None  # the call of torch.distributed around it
    source: Activity | None  # behind what the record before it lies


class _Events:
    """One way through the host's calls: which record and which wait lie between which launches."""

    def __init__(self, trace: RankTrace, order: HostOrder, waits: Waits, exact: ExactEvents) -> None:
        self._order = order
        self._waits = waits
        self._exact = exact
        self._scopes = _Scopes(trace.collectives)
        self._operators = trace.operators
        self._last: dict[int, Activity] = {}  # the last launched, by thread
        self._last_of_caller: dict[int, Activity] = {}  # the same, without collectives on streams of their own
        self._last_on_lane: dict[tuple[int, int], Activity] = {}  # by stream, in whichever thread
        self._records: dict[int, Activity | None] = {}  # behind what a thread's last record lies, until a wait takes it
        self._open: dict[int, list[_OpenWait]] = {}  # by thread, waits without a target yet
        self._last_of_group: dict[tuple[str, str], Activity] = {}  # by communicator
        self._outstanding: list[Activity] = []  # collectives that nobody has waited for yet
        self._starts = {lane: [activity.start_us for activity in found] for lane, found in order.lanes.items()}

    def find(self) -> None:
        for call in self._order.calls:
            scope = self._scopes.around(call)
            if call.role is Role.LAUNCH:
                self._launch(call, scope)
            elif call.role is Role.RECORD and (scope is None or scope.message.collective == "wait"):
                if call not in self._exact.records:
                    self._records[call.thread] = self._before(self._last, call.thread)
            elif call.role is Role.WAIT_EVENT and call in self._exact.edges:
                self._follow(call)
                self._open.setdefault(call.thread, []).append(_OpenWait(call, scope, None))
            elif call.role is Role.WAIT_EVENT and not self._is_inside_nccl(call, scope):
                source = self._records.pop(call.thread, None) if scope is None else None
                self._open.setdefault(call.thread, []).append(_OpenWait(call, scope, source))

    def _is_inside_nccl(self, call: Call, scope: CollectiveCall | None) -> bool:
        if scope is None or scope.message.collective == "wait":
            return False
        around = self._operators.around(call.thread, call.start_us, 20)
        return any(inside.name.startswith("nccl:") for inside in around)

    def _launch(self, call: Call, scope: CollectiveCall | None) -> None:
        target = call.activities[0]
        own: list[_OpenWait] = []
        rest: list[_OpenWait] = []
        for wait in self._open.pop(call.thread, ()):
            is_own = wait.scope is not None and wait.scope is scope and wait.scope.message.collective != "wait"
            (own if is_own else rest).append(wait)
        if target.kind is ActivityKind.COMMUNICATION and scope is not None:
            self._waits.is_on_own_stream[target] = bool(own)
            if own and own[0].call not in self._exact.edges:
                self._add(target, self._before(self._last_of_caller, call.thread))
        for wait in rest:
            if wait.call not in self._exact.edges:
                self._resolve(target, *wait)
        if target.kind is ActivityKind.COMMUNICATION and scope is not None and is_ordered(target):
            self._keep_order(target)
        self._last[call.thread] = self._last_on_lane[call.activities[-1].lane] = call.activities[-1]
        is_beside = self._waits.is_on_own_stream.get(target, False)
        if is_beside:
            self._outstanding.append(target)
            del self._outstanding[:-_MOST_OUTSTANDING]
        else:
            self._last_of_caller[call.thread] = call.activities[-1]

    def _keep_order(self, target: Activity) -> None:
        source = self._last_of_group.get(group_of(target))
        self._last_of_group[group_of(target)] = target
        if source is not None and source not in self._waits.events.get(target, ()) and self._add(target, source):
            self._waits.in_order.add((target, source))

    def _before(self, last: Mapping[int, Activity], thread: int) -> Activity | None:
        """What was launched last, by any thread, on the stream that a thread used last: autograd launches for its caller too."""
        own = last.get(thread)
        return None if own is None else self._last_on_lane[own.lane]

    def _follow(self, wait: Call) -> None:
        """Adds the edges of a wait that is known."""
        target, sources = self._exact.edges[wait]
        if target is None:
            return
        for source in sources:
            self._add(target, source)
            if source in self._outstanding and target.lane != source.lane:
                self._take(source, wait)

    def _resolve(self, target: Activity, wait: Call, scope: CollectiveCall | None, source: Activity | None) -> None:
        """Finds what a wait before ``target`` is for."""
        if source is not None and source.lane != target.lane:
            self._add(target, source)
            if source in self._outstanding:
                self._take(source, wait)
            return
        group = scope.message.group if scope is not None else ""
        possible = [
            work
            for work in self._outstanding
            if work.lane != target.lane
            and work.end_us <= target.start_us + _CLOCK_US
            and (not group or not work.message.group or work.message.group == group)
        ]
        binding = [work for work in possible if work.end_us >= target.start_us - _NEAR_US]
        if not binding:
            self._add(target, self._ended_before(target, wait))
        if possible:
            chosen = binding[0] if binding else possible[0]
            self._add(target, chosen)
            self._take(chosen, wait)

    def _ended_before(self, target: Activity, wait: Call) -> Activity | None:
        """What of another stream ended just before a work started for which no other reason is known: some traces lack records."""
        lane = self._order.lanes[target.lane]
        place = bisect_right(self._starts[target.lane], target.start_us) - 2
        free_us = lane[place].end_us if place >= 0 else 0.0
        assert target.call is not None, "what waits was launched"
        if target.start_us - max(free_us, target.call.start_us) < _UNEXPLAINED_US:
            return None
        near_us = _NEAR_US if len(target.call.activities) == 1 else _GRAPH_US
        found = []
        for lane_of, ends in self._order.ends_us.items():
            at = bisect_right(ends, target.start_us + _CLOCK_US) - 1
            while lane_of != target.lane and at >= 0 and ends[at] >= target.start_us - near_us:
                source = self._order.lanes[lane_of][at]
                if source.call is None or source.call.start_us < wait.start_us:
                    found.append(source)
                    break
                at -= 1
        return max(found, key=lambda source: source.end_us, default=None)

    def _take(self, work: Activity, wait: Call) -> None:
        self._outstanding.remove(work)
        self._waits.waited_at[work] = wait

    def _add(self, target: Activity, source: Activity | None) -> bool:
        """Whether it may be so."""
        if source is None or source.lane == target.lane or source.end_us > target.start_us + _CLOCK_US:
            return False
        self._waits.events.setdefault(target, []).append(source)
        return True


class _Scopes:
    """Calls of torch.distributed, to find the one around a CUDA call."""

    def __init__(self, collectives: list[CollectiveCall]) -> None:
        self._by_thread: dict[int, list[CollectiveCall]] = {}
        for collective in collectives:
            self._by_thread.setdefault(collective.thread, []).append(collective)
        self._starts = {thread: [one.start_us for one in found] for thread, found in self._by_thread.items()}

    def around(self, call: Call) -> CollectiveCall | None:
        """The innermost one; None if there is none."""
        found = self._by_thread.get(call.thread)
        if not found:
            return None
        last = bisect_right(self._starts[call.thread], call.start_us)
        return next((one for one in reversed(found[max(last - 4, 0) : last]) if one.end_us >= call.start_us), None)


def _find_returns(order: HostOrder, waits: Waits, exact: ExactEvents) -> None:
    latest: Activity | None = None
    for call in order.calls:
        if call.role is Role.LAUNCH:
            latest = call.activities[-1]
            waits.returns.update(_of_launch(call, order))
            continue
        if call.role in (Role.SYNC_DEVICE, Role.FREE):
            waited: Iterable[Activity] = _last_launched(order, call)
            waits.returns[call] = [one for one in waited if one.end_us <= call.end_us + _CLOCK_US]
        elif call.role in (Role.SYNC_STREAM, Role.SYNC_EVENT):
            known = exact.returns.get(call)
            guessed = None if known else _waited_for(call, order) or latest
            waited = known or (() if guessed is None else (guessed,))
            waits.returns[call] = [one for one in waited if one.end_us <= call.end_us + _CLOCK_US]


def _last_launched(order: HostOrder, call: Call) -> Iterator[Activity]:
    """Each stream's last activity that was launched before a call."""
    for lane, activities in order.lanes.items():
        place = bisect_right(order.launched_us[lane], call.start_us) - 1
        if place >= 0:
            yield activities[place]


def _waited_for(call: Call, order: HostOrder) -> Activity | None:
    """The activity whose end let a call return; None if the call did not wait."""
    best: Activity | None = None
    for lane, activities in order.lanes.items():
        place = bisect_right(order.ends_us[lane], call.end_us + _CLOCK_US) - 1
        num_launched = bisect_right(order.launched_us[lane], call.start_us)
        if place < 0 or num_launched <= place:
            continue
        activity = activities[place]
        is_last = call.role is Role.SYNC_EVENT or num_launched == place + 1
        if is_last and activity.end_us > max(call.start_us, call.end_us - _RETURN_US):
            best = activity if best is None or activity.end_us > best.end_us else best
    return best


def _of_launch(call: Call, order: HostOrder) -> dict[Call, list[Activity]]:
    """A copy out of pageable memory blocks its caller; so does a launch where too many are under way."""
    activity = call.activities[-1]
    if "Pageable" in activity.name and call.end_us > activity.start_us and call.end_us > activity.end_us - 40.0:
        return {call: [activity]}
    if call.end_us - call.start_us < _LONG_CALL_US:
        return {}
    launched, ends = order.launched_us[activity.lane], order.ends_us[activity.lane]
    num_under_way = bisect_right(launched, call.start_us) - bisect_right(ends, call.start_us)
    place = bisect_right(ends, call.end_us) - 1
    if num_under_way < _QUEUE or place < 0 or ends[place] <= call.start_us:
        return {}
    return {call: [order.lanes[activity.lane][place]]}


def _within_graph(activities: list[Activity], waits: Waits) -> None:
    """Work of one CUDA graph has no waits of the host's: what starts just after another stream's end waited for it."""
    in_order = sorted(activities, key=lambda activity: activity.end_us)
    ends = [activity.end_us for activity in in_order]
    for target in activities:
        place = bisect_right(ends, target.start_us + _CLOCK_US) - 1
        while place >= 0 and ends[place] >= target.start_us - _NEAR_US:
            if in_order[place].lane != target.lane:
                waits.events.setdefault(target, []).append(in_order[place])
                break
            place -= 1
