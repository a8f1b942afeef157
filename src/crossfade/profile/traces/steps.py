"""Where the steps of a traced program begin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from crossfade.profile.traces.events import RankTrace
from crossfade.profile.traces.launches import HostOrder

MARK = "ProfilerStep#"
_MOST_DIFFERENT = 0.02  # so much of a period may differ from the one before
_LEAST_COVERED = 0.6  # so much of all launches must repeat
_MOST_NAMES = 100
_MOST_PERIODS = 300


def step_starts(trace: RankTrace, order: HostOrder) -> list[float]:
    """When, on the host, each step begins; a single 0 where no steps are seen.

    Steps are those that ``prof.step()`` marks; without marks, the period in which the same kernels are launched on the same
    streams. A period may begin anywhere: the longest pause of the host before a launch is taken for its begin.
    """
    launches = [(call, call.activities[0]) for call in order.calls if call.activities]
    last_us = launches[-1][0].start_us if launches else 0.0
    marks = [scope.start_us for scope in trace.operators.named(MARK) if scope.start_us <= last_us]
    if len(marks) >= 2:
        return marks
    numbers: dict[tuple[str, tuple[int, int]], int] = {}
    sequence = np.array(
        [numbers.setdefault((activity.name, activity.lane), len(numbers)) for _, activity in launches], dtype=np.int64
    )
    found = _period_of(sequence)
    if found is None:
        return [0.0]
    period, first = found
    times = [call.start_us for call, _ in launches]
    ends = [call.end_us for call, _ in launches]
    phase = max(range(first, first + period), key=lambda place: _pause_before(place, period, times, ends))
    return [times[place] for place in range(phase, len(times), period)]


def _period_of(sequence: npt.NDArray[np.int64]) -> tuple[int, int] | None:
    """After how many launches all repeats, and from where on it does; None if it does not.

    Of several periods the one that repeats most exactly is taken: within a step its layers repeat too, but for its begin and end.
    """
    places: dict[int, list[int]] = {}
    for place, number in enumerate(sequence.tolist()):
        places.setdefault(number, []).append(place)
    rarest = sorted((found for found in places.values() if len(found) >= 2), key=len)[:_MOST_NAMES]
    periods = {later - earlier for found in rarest for earlier, later in pairwise(found)}
    best: tuple[float, int, int] | None = None
    for period in sorted(periods)[-_MOST_PERIODS:]:
        differs = sequence[:-period] != sequence[period:]
        shares = np.cumsum(differs[::-1])[::-1] / np.arange(len(differs), 0, -1)
        alike = np.flatnonzero(shares <= _MOST_DIFFERENT)
        if not len(alike):
            continue
        first, num = int(alike[0]), len(sequence) - int(alike[0])
        if num >= max(2 * period, _LEAST_COVERED * len(sequence)):
            share = round(float(shares[first]), 3)
            if best is None or share < best[0]:
                best = share, period, first
    return None if best is None else best[1:]


def _pause_before(place: int, period: int, times: Sequence[float], ends: Sequence[float]) -> float:
    pauses = [times[at] - ends[at - 1] for at in range(place, len(times), period) if at]
    return sorted(pauses)[len(pauses) // 2] if pauses else 0.0
