"""Streams that share a hardware queue: known only of traces by `crossfade.record`, which have the number of queues."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from crossfade.profile.doctor.changes import without_lateness
from crossfade.profile.doctor.program import NOBODY
from crossfade.profile.doctor.view import Cause, Finding, View, share

__all__ = ["hardware_queues", "held_by_a_queue"]

_WORTH_A_LOOK = 0.01
_LATE_US = 8.0
_NEAR_US = 12.0  # so soon after what was launched before it, a work was behind it in a queue
_CLOCK_US = 2.0


def hardware_queues(view: View) -> Iterator[Finding]:
    """Work that could start, and starts only when what was launched before it on other streams has started."""
    found = held_by_a_queue(view)
    late = sum(view.traced.late_us[number] for number in found) / view.program.num_ranks
    if view.share_of(late) < _WORTH_A_LOOK:
        return
    num_streams = max(_num_streams(view, rank) for rank in range(view.program.num_ranks))
    num_queues = min(trace.record.num_queues for trace in view.traced.traces if trace.record is not None)
    yield Finding(
        Cause.QUEUES,
        f"{num_streams} streams share {num_queues} hardware queue(s): work waits behind what other streams wait for",
        f"{len(found) / view.program.num_steps / view.program.num_ranks:.3g} kernels and copies a step could start, and start just"
        f" when what was launched before them on another stream does, {share(view.share_of(late))} of the time late in all",
        view.sites({view.program.works[number].call for number in found} - {NOBODY}),
        "give CUDA more queues than the program has streams, before it starts; or launch what waits for others last",
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
        view.work_marks(found, "behind another stream"),
        partial(without_lateness, works=found),
        is_at_most=True,
        likely=partial(without_lateness, works=found),
    )


def held_by_a_queue(view: View) -> list[int]:
    """Late work of ranks that have more streams than queues, where it starts just after what was launched before it."""
    found: list[int] = []
    for rank, trace in enumerate(view.traced.traces):
        if trace.record is None or _num_streams(view, rank) <= trace.record.num_queues:
            continue
        works = [n for n, work in enumerate(view.program.works) if work.rank == rank and work.call != NOBODY]
        latest, latest_lane = float("-inf"), NOBODY
        for number in sorted(works, key=lambda n: view.program.works[n].call):
            start, lane = view.traced.starts_us[number], view.program.works[number].lane
            is_behind = -_CLOCK_US <= start - latest <= _NEAR_US and lane != latest_lane
            if is_behind and view.traced.late_us[number] > _LATE_US and view.traced.held_by[number] != "":
                found.append(number)
            if start > latest:
                latest, latest_lane = start, lane
    return found


def _num_streams(view: View, rank: int) -> int:
    return len({work.lane for work in view.program.works if work.rank == rank})
