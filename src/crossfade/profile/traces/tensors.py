"""What makes the input of each collective, and what needs its result, where a record has the tensors of operators.

Operators are known by the number that both torch's profiler and its execution trace give them, tensors by their storages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from crossfade.profile.traces.events import Activity, ActivityKind, Call, RankTrace
from crossfade.profile.traces.roles import Role


@dataclass
class Dataflow:
    """Of one rank; only what the trace has.

    Attributes:
        made_by: for each collective, the last activity before it that writes what it reads.
        needed_by: for each collective, the first activity behind it that reads or writes what it writes.
    """

    made_by: dict[Activity, Activity] = field(default_factory=dict)
    needed_by: dict[Activity, Activity] = field(default_factory=dict)


def dataflow(trace: RankTrace) -> Dataflow:
    """Follows the storages through the operators; empty without a record of tensors.

    A view launches nothing, so that it counts neither as a write nor as a read. Of operators within another one the inner one is
    what writes; the outer one's first activity is what reads.
    """
    flow = Dataflow()
    if trace.record is None or not trace.record.tensors:
        return flow
    launches: dict[int, list[Call]] = {}
    for call in trace.calls:
        if call.role is Role.LAUNCH and call.activities:
            launches.setdefault(call.thread, []).append(call)
    starts = {thread: [call.start_us for call in calls] for thread, calls in launches.items()}
    uses = [(trace.numbered[use.operator], use) for use in trace.record.tensors if use.operator in trace.numbered]
    written: dict[int, Activity] = {}
    for (thread, start_us, end_us), use in sorted(uses, key=lambda pair: pair[0][1]):
        times = starts.get(thread, [])
        calls = launches.get(thread, [])[bisect_left(times, start_us) : bisect_right(times, end_us)]
        activities = [activity for call in calls for activity in call.activities]
        for activity in activities:
            before = [found for one in use.reads if (found := written.get(one)) is not None and found is not activity]
            if before and activity.kind is ActivityKind.COMMUNICATION:
                flow.made_by[activity] = max(before, key=lambda one: one.launched_us)
        for storage in (*use.reads, *use.writes) if activities else ():
            last = written.get(storage)
            if last is not None and last.kind is ActivityKind.COMMUNICATION and last not in activities:
                flow.needed_by.setdefault(last, activities[0])
        if activities:
            written.update(dict.fromkeys(use.writes, activities[-1]))
    return flow
