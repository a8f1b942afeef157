"""What makes the input of each collective, where a record has the tensors of operators.

Operators are known by the number that both torch's profiler and its execution trace give them, tensors by their storages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from crossfade.profile.traces.events import Activity, ActivityKind, Call, RankTrace
from crossfade.profile.traces.roles import Role

__all__ = ["producers"]


def producers(trace: RankTrace) -> dict[Activity, Activity]:
    """For each collective the last activity before it that writes what it reads; only those that the trace has.

    A view launches nothing, so that it counts for no write. Of operators within another one the inner one counts.
    """
    if trace.record is None:
        return {}
    launches: dict[int, list[Call]] = {}
    for call in trace.calls:
        if call.role is Role.LAUNCH and call.activities:
            launches.setdefault(call.thread, []).append(call)
    starts = {thread: [call.start_us for call in calls] for thread, calls in launches.items()}
    uses = [(trace.numbered[use.operator], use) for use in trace.record.tensors if use.operator in trace.numbered]
    written: dict[int, Activity] = {}
    found: dict[Activity, Activity] = {}
    for (thread, start_us, end_us), use in sorted(uses, key=lambda pair: pair[0][1]):
        times = starts.get(thread, [])
        calls = launches.get(thread, [])[bisect_left(times, start_us) : bisect_right(times, end_us)]
        activities = [activity for call in calls for activity in call.activities]
        for collective in (one for one in activities if one.kind is ActivityKind.COMMUNICATION):
            before = [
                written[storage] for storage in use.reads if storage in written and written[storage] is not collective
            ]
            if before:
                found[collective] = max(before, key=lambda one: one.call.start_us if one.call is not None else 0.0)
        if activities:
            written.update(dict.fromkeys(use.writes, activities[-1]))
    return found
