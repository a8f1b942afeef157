"""Collectives of several ranks: which belong together, and how far the ranks' clocks are apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from crossfade.errors import TraceError
from crossfade.profile.traces.events import Activity, ActivityKind, RankTrace

_PAIRWISE = ("send", "recv", "SendRecv", "coalesced")


def match_collectives(traces: Sequence[RankTrace]) -> list[list[tuple[int, Activity]]]:
    """Collectives that all traced ranks of a group took part in: for each, the trace's place and the activity.

    The k-th collective of a group on one rank is the k-th on the others; a group's ones are matched up to the first pair that
    differs in name or size. Sends and receives are not matched: a trace does not say with whom.

    Raises:
        TraceError: the ranks of no group have any collective in common.
    """
    by_group: dict[tuple[str, str], dict[int, list[Activity]]] = {}
    for place, trace in enumerate(traces):
        for activity in sorted(trace.activities, key=lambda one: one.launched_us):
            if (
                activity.kind is ActivityKind.COMMUNICATION
                and "nccl" in activity.name.lower()
                and not _is_pairwise(activity)
            ):
                by_group.setdefault(group_of(activity), {}).setdefault(place, []).append(activity)
    matched = []
    for members in by_group.values():
        if len(members) < 2:
            continue
        for parts in zip(*members.values(), strict=False):
            if len({_what(part) for part in parts}) > 1:
                break
            matched.append(list(zip(members, parts, strict=True)))
    kinds = [[_kinds(parts) for parts in members.values()] for (name, _), members in by_group.items() if name]
    shared = [of_ranks for of_ranks in kinds if len(of_ranks) > 1 and all(of_ranks)]
    if shared and not any(set.intersection(*of_ranks) for of_ranks in shared):
        raise TraceError(
            "the ranks' traces have no collective in common", hint="give one file for each rank, all of one run"
        )
    return matched


def align(traces: Sequence[RankTrace], matched: Sequence[Sequence[tuple[int, Activity]]]) -> list[float]:
    """What to add to each trace's times, in microseconds, so that they are on the first one's clock.

    Ranks of one host share a clock but for 6 to 36 us, which differ from trace to trace: collectives end together, so the median
    difference of their ends is taken away.
    """
    shifts = [(trace.origin_ns - traces[0].origin_ns) / 1e3 for trace in traces]
    for place in range(1, len(traces)):
        differences = []
        for parts in matched:
            ends = {number: part.end_us for number, part in parts}
            if place in ends:
                reference = min(ends)
                if reference != place:
                    differences.append(ends[reference] + shifts[reference] - ends[place] - shifts[place])
        if differences:
            shifts[place] += median(differences)
    return shifts


def is_ordered(activity: Activity) -> bool:
    """Whether it is known to have its communicator's order: sends and receives may have a communicator for each pair of ranks."""
    return bool(activity.message.group) and not _is_pairwise(activity)


def _is_pairwise(activity: Activity) -> bool:
    name = activity.message.collective or activity.name
    return any(mark in name for mark in _PAIRWISE)


def group_of(activity: Activity) -> tuple[str, str]:
    """Its communicator: the group's name and ranks, empty where the trace does not say."""
    if not activity.message.group:
        return "", ""
    return activity.message.group, activity.message.ranks


def _what(activity: Activity) -> tuple[object, ...]:
    message = activity.message
    if not message.collective:
        return (activity.name,)
    return message.collective, message.num_in, message.num_out, message.dtype


def _kinds(activities: Sequence[Activity]) -> set[tuple[object, ...]]:
    """What all ranks of a group have, whichever steps were traced: all-reduces by size; others may have sizes of each rank's own.
    Any two programs have barriers.
    """
    names = [(one, one.message.collective) for one in activities if one.message.collective != "barrier"]
    return {_what(one) if "allreduce" in name else (name,) for one, name in names}
