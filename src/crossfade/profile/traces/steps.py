"""Where the steps of a traced program begin."""

from __future__ import annotations

from collections.abc import Sequence

from crossfade.profile.traces.events import RankTrace
from crossfade.profile.traces.launches import HostOrder

__all__ = ["step_starts"]

_MARK = "ProfilerStep#"
_ALIKE = 0.98  # so much of a period must be as in the period before
_MOST_PERIODS = 40


def step_starts(trace: RankTrace, order: HostOrder) -> list[float]:
    """When, on the host, each step begins; a single 0 where no steps are seen.

    Steps are those that ``prof.step()`` marks; without marks, the period in which the same kernels are launched on the same
    streams. A period may begin anywhere: the longest pause of the host before a launch is taken for its begin.
    """
    marks = [scope.start_us for scope in trace.operators.named(_MARK)]
    if len(marks) >= 2:
        return marks
    launches = [(call, call.activities[0]) for call in order.calls if call.activities]
    numbers: dict[tuple[str, tuple[int, int]], int] = {}
    sequence = [numbers.setdefault((activity.name, activity.lane), len(numbers)) for _, activity in launches]
    found = _period_of(sequence)
    if found is None:
        return [0.0]
    period, first = found
    times = [call.start_us for call, _ in launches]
    ends = [call.end_us for call, _ in launches]
    phase = max(range(first, first + period), key=lambda place: _pause_before(place, period, times, ends))
    return [times[place] for place in range(phase, len(times), period)]


def _period_of(sequence: Sequence[int]) -> tuple[int, int] | None:
    """After how many launches all repeats, and from where on it does; None if it does not."""
    places: dict[int, list[int]] = {}
    for place, number in enumerate(sequence):
        places.setdefault(number, []).append(place)
    rarest = sorted((found for found in places.values() if len(found) >= 2), key=len)
    periods = {
        later - earlier
        for found in rarest[:_MOST_PERIODS]
        for earlier, later in zip(found[-2:-1], found[-1:], strict=True)
    }
    for period in sorted(periods):
        first = _repeats_from(sequence, period)
        if first is not None and len(sequence) - first >= 2 * period:
            return period, first
    return None


def _repeats_from(sequence: Sequence[int], period: int) -> int | None:
    """From where on, up to the end, a sequence repeats after a period; None if not even once."""
    first, num_different = len(sequence), 0
    for place in range(len(sequence) - period - 1, -1, -1):
        num_different += sequence[place] != sequence[place + period]
        if num_different > (1 - _ALIKE) * period + (1 - _ALIKE) * (len(sequence) - period - place):
            break
        first = place
    return first if len(sequence) - period - first >= period else None


def _pause_before(place: int, period: int, times: Sequence[float], ends: Sequence[float]) -> float:
    pauses = [times[at] - ends[at - 1] for at in range(place, len(times), period) if at]
    return sorted(pauses)[len(pauses) // 2] if pauses else 0.0
