"""Ways of a step that are close are timed a second time."""

from __future__ import annotations

import itertools
import math

import pytest

from crossfade.batches.calibration import WARM_MS, Calibration, Moves, Way, choose

ONE, GROUPS, COPIES = (Way(moves) for moves in Moves)
CAPTURED = [Way(moves, is_captured=True) for moves in Moves]


def test_ways_that_are_close_are_timed_again_when_the_gpu_is_warm() -> None:
    """As seen on two GPUs at their power limit: process groups looked faster in the first steps, and were not in those to come."""
    calibration = Calibration([ONE, GROUPS, COPIES])
    while (trial := calibration.next()) is not None:
        if trial.is_timed:
            calibration.note(trial.way, {ONE: 60.4, GROUPS: 56.85, COPIES: 57.01}[trial.way], 10.0)
    first = dict(zip(calibration.ways, calibration.medians_ms(), strict=True))
    assert choose(first) == GROUPS
    assert calibration.add_second_comparison(first)
    again = list(iter(calibration.next, None))
    warm = list(itertools.takewhile(lambda trial: not (trial.is_timed or trial.lines_up), again))
    assert {trial.way for trial in warm} == {GROUPS}
    assert sum(first[trial.way] for trial in warm) >= WARM_MS
    idle = [k for k, trial in enumerate(again) if trial.begins_idle]
    assert [again[k].way for k in idle] == [GROUPS, COPIES, ONE, ONE, COPIES, GROUPS], "each row"
    timed = [trial.way for trial in again if trial.is_timed]
    assert timed == [way for way in (GROUPS, COPIES, ONE, ONE, COPIES, GROUPS) for _ in range(4)], (
        "one batch, to compare with"
    )
    assert [trial.way for trial in again[len(warm) :]].count(COPIES) * 57.01 >= 2 * (300 + 200), "two rows"
    for way in timed:
        calibration.note(way, {ONE: 63.4, GROUPS: 60.6, COPIES: 59.4}[way], 100.0)
    second = dict(zip(calibration.ways, calibration.medians_ms(), strict=True))
    assert second == {ONE: 63.4, GROUPS: 60.6, COPIES: 59.4}
    assert choose(second) == COPIES
    assert not calibration.add_second_comparison(second), "once"
    assert calibration.next() is None


@pytest.mark.parametrize(
    ("medians", "again"),
    [
        ({ONE: 10.0, GROUPS: 9.0}, None),
        ({ONE: 10.0, GROUPS: 9.6}, [GROUPS] * 20 + [ONE] * 40 + [GROUPS] * 20),
        ({ONE: 100.0, GROUPS: 99.0}, [ONE] * 4 + [GROUPS] * 8 + [ONE] * 4),
        ({ONE: 0.73, GROUPS: 0.65, COPIES: 0.91}, [GROUPS] * 20 + [ONE] * 40 + [GROUPS] * 20),
        ({ONE: math.inf, GROUPS: math.inf}, None),
        ({ONE: 0.5, CAPTURED[0]: 0.35, GROUPS: 1.0, CAPTURED[1]: 0.65}, None),
    ],
)
def test_only_what_is_close_is_timed_again(medians: dict[Way, float], again: list[Way] | None) -> None:
    calibration = Calibration(list(medians))
    for _ in iter(calibration.next, None):
        pass
    assert calibration.add_second_comparison(medians) == (again is not None)
    assert [trial.way for trial in iter(calibration.next, None) if trial.is_timed] == (again or [])


def test_what_is_far_behind_is_out_of_it_and_launches_are_in_the_rows_of_the_second_time() -> None:
    calibration = Calibration([ONE, COPIES, *CAPTURED[::2]])
    first = {ONE: 35.0, COPIES: 34.0, CAPTURED[0]: 40.0, CAPTURED[2]: 33.0}
    for way, taken_ms in first.items():
        calibration.note(way, 29.0 if way == COPIES else taken_ms, 34.0 if way == COPIES else 3.0)
    assert dict(zip(calibration.ways, calibration.medians_ms(), strict=True)) == first
    assert calibration.add_second_comparison(first)
    assert calibration.ways == [CAPTURED[2], COPIES, ONE]
    for way, taken_ms in ((CAPTURED[2], 33.5), (COPIES, 34.5), (ONE, 36.0)):
        calibration.note(way, taken_ms, 90.0)
    assert calibration.medians_ms() == [33.5, 34.5, 36.0]
