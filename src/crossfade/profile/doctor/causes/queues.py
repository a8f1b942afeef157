"""Streams that wait for each other although the program does not ask for it: by a hardware queue, or by the default stream.

Hardware queues are known only of traces by `crossfade.record`, which have their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from crossfade.profile.doctor.changes import without_edges, without_lateness
from crossfade.profile.doctor.program import NOBODY
from crossfade.profile.doctor.view import Cause, Finding, View, share
from crossfade.profile.traces.default_stream import DEFAULT_STREAM

_LATE_US = 8.0
_NEAR_US = 12.0  # so soon after what was launched before it, a work was behind it in a queue
_CLOCK_US = 2.0


def hardware_queues(view: View) -> Iterator[Finding]:
    """Work that could start, and starts only when what was launched before it on other streams has started."""
    found = held_by_a_queue(view)
    late = sum(view.traced.late_us[number] for number in found) / view.program.num_ranks
    if not view.is_worth_a_look(late):
        return
    num_streams = max(_num_streams(view, rank) for rank in range(view.program.num_ranks))
    num_queues = min(trace.record.num_queues for trace in view.traced.traces if trace.record is not None)
    yield Finding(
        Cause.QUEUES,
        f"{num_streams} streams share {num_queues} hardware queue(s): work waits behind what other streams wait for",
        f"{view.a_step(len(found)):.3g} kernels and copies a step could start, and start just"
        f" when what was launched before them on another stream does, {share(view.share_of(late))} of the time late in all",
        view.work_sites(found),
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


def default_stream(view: View) -> Iterator[Finding]:
    """Work of a stream that waits for the default stream's, and the reverse, without an event.

    The default stream may need what the other one makes, and then it has to wait; that the other one waits for it is more seldom
    meant. So its own waits stay in what is likely.
    """
    edges = {
        (view.places[id(target)], view.places[id(source)])
        for waits in view.traced.waits
        for target, source in waits.implicit
        if id(target) in view.places and id(source) in view.places
    }
    if not edges:
        return
    of_others = {edge for edge in edges if view.traced.activities[edge[0]].stream != DEFAULT_STREAM}
    streams = sorted({view.traced.activities[target].stream for target, _ in of_others})
    binding = [number for number, source in sorted(edges) if _is_held_by(view, number, source)]
    yield Finding(
        Cause.DEFAULT_STREAM,
        f"stream {', '.join(map(str, streams))} and the default stream wait for each other, without an event",
        f"{view.a_step(len(binding)):.3g} kernels and copies a step start just when the other"
        " stream's work ends, and the two never run at once: so does a stream that was made without cudaStreamNonBlocking",
        view.work_sites(target for target, _ in of_others),
        "use a stream that does not wait for the default one, as torch.cuda.Stream() and cupy.cuda.Stream(non_blocking=True) are,"
        " and an event where one of both needs the other's result; or launch nothing on the default stream",
        "stream = torch.cuda.Stream()\nwith torch.cuda.stream(stream):\n    ...",
        view.work_marks(binding, "waits for the other stream"),
        partial(without_edges, edges=edges),
        is_at_most=True,
        likely=partial(without_edges, edges=of_others),
    )


def _is_held_by(view: View, number: int, source: int) -> bool:
    held = view.traced.held_by[number]
    return isinstance(held, int) and view.program.works[number].after[held].work == source
