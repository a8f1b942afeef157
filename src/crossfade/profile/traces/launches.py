"""Which call launched which activity, and in which order the host went on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from crossfade.profile.traces.events import Activity, Call, RankTrace
from crossfade.profile.traces.roles import Role


@dataclass(frozen=True)
class HostOrder:
    """A rank's launching threads as one order of calls."""

    # all that launch, wait, allocate, or record and wait for events, by start. What launches nothing that was traced is left out:
    # its time belongs to the gap before the next call.
    calls: list[Call]
    # for each call the place of the one that ended last before it started, in whichever thread; -1 for the first. While the
    # autograd engine's thread runs the backward pass, the main thread waits for it, which no event says.
    before: list[int]
    lanes: dict[tuple[int, int], list[Activity]]  # each stream's activities in their order

    @cached_property
    def launched_us(self) -> dict[tuple[int, int], list[float]]:
        """For each stream, when its activities were launched, none before the one ahead of it: ascending."""
        return {lane: [*accumulate((one.launched_us for one in found), max)] for lane, found in self.lanes.items()}

    @cached_property
    def ends_us(self) -> dict[tuple[int, int], list[float]]:
        """For each stream, when its activities ended."""
        return {lane: [activity.end_us for activity in found] for lane, found in self.lanes.items()}


def host_order(trace: RankTrace) -> HostOrder:
    """Joins calls and activities by their correlation, and threads by time."""
    launches = {call.correlation: call for call in trace.calls if call.role is Role.LAUNCH}
    for call in launches.values():
        call.activities.clear()
    lanes: dict[tuple[int, int], list[Activity]] = {}
    for activity in trace.activities:
        lanes.setdefault(activity.lane, []).append(activity)
        activity.call = launches.get(activity.correlation)
        if activity.call is not None:
            activity.call.activities.append(activity)
    threads = {call.thread for call in launches.values() if call.activities}
    calls = [
        call for call in trace.calls if call.thread in threads and (call.activities or call.role is not Role.LAUNCH)
    ]
    return HostOrder(calls, _ended_before(calls), lanes)


def _ended_before(calls: list[Call]) -> list[int]:
    before: list[int] = []
    last: dict[int, list[int]] = {}  # by thread, the calls that are not known to be over, and the last that is
    for place, call in enumerate(calls):
        best, best_end = -1, float("-inf")
        for started in last.values():
            while len(started) > 1 and calls[started[1]].end_us <= call.start_us:
                del started[0]
            end = calls[started[0]].end_us
            if best_end < end <= call.start_us:
                best, best_end = started[0], end
        before.append(best)
        last.setdefault(call.thread, []).append(place)
    return before
