"""Ways of a step that are close are timed a second time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest

from crossfade.batches.calibration import WARM_MS, Calibration, Moves, Way, choose

ONE, GROUPS, COPIES = (Way(moves) for moves in Moves)
CAPTURED = [Way(moves, is_captured=True) for moves in Moves]


def no_launches(ways: Iterable[Way]) -> dict[Way, float]:
    return dict.fromkeys(ways, 0.0)


def measured(calibration: Calibration) -> dict[Way, float]:
    return dict(zip(calibration.ways, calibration.medians_ms(), strict=True))


def test_ways_that_are_close_are_timed_again_when_the_gpu_is_warm() -> None:
    """As seen on two GPUs at their power limit: process groups looked faster in the first steps, and were not in those to come."""
    calibration = Calibration([ONE, GROUPS, COPIES])
    while (trial := calibration.next()) is not None:
        if trial.is_timed:
            calibration.note(trial.way, {ONE: 60.4, GROUPS: 56.85, COPIES: 57.01}[trial.way], 10.0)
    first = measured(calibration)
    assert choose(first) == GROUPS
    assert calibration.add_second_comparison(first, calibration.launches_ms)
    again = list(iter(calibration.next, None))
    warm = list(itertools.takewhile(lambda trial: not (trial.is_timed or trial.lines_up or trial.begins_idle), again))
    assert sum(first[trial.way] for trial in warm) >= WARM_MS
    in_turns = [way for way, _ in itertools.groupby(trial.way for trial in warm)]
    assert in_turns[:5] == [GROUPS, COPIES, ONE, COPIES, GROUPS], "each way, in rows"
    assert len({[trial.way for trial in warm].count(way) for way in (ONE, GROUPS, COPIES)}) == 1, "all for as long"
    idle = [k for k, trial in enumerate(again) if trial.begins_idle]
    assert [again[k].way for k in idle] == [GROUPS, COPIES, ONE, ONE, COPIES, GROUPS], "each row"
    timed = [trial.way for trial in again if trial.is_timed]
    assert timed == [way for way in (GROUPS, COPIES, ONE, ONE, COPIES, GROUPS) for _ in range(4)], (
        "one batch, to compare with"
    )
    assert [trial.way for trial in again[len(warm) :]].count(COPIES) * 57.01 >= 2 * (300 + 200), "two rows"
    for way in timed:
        calibration.note(way, {ONE: 63.4, GROUPS: 60.6, COPIES: 59.4}[way], 10.0)
    second = measured(calibration)
    assert second == {ONE: 63.4, GROUPS: 60.6, COPIES: 59.4}
    assert choose(second) == COPIES
    assert not calibration.add_second_comparison(second, calibration.launches_ms), "once"
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
    assert calibration.add_second_comparison(medians, no_launches(medians)) == (again is not None)
    assert [trial.way for trial in iter(calibration.next, None) if trial.is_timed] == (again or [])


@pytest.mark.parametrize(
    ("medians", "launches_ms", "compared"),
    [
        ({ONE: 6.4, GROUPS: 5.7, COPIES: 8.9}, {ONE: 1.5, GROUPS: 5.3, COPIES: 8.9}, {ONE, GROUPS}),
        ({ONE: 15.3, GROUPS: 13.9, COPIES: 16.5}, {ONE: 4.4, GROUPS: 12.2, COPIES: 14.7}, {ONE, GROUPS, COPIES}),
        ({ONE: 6.4, GROUPS: 7.5, COPIES: 9.0}, {ONE: 1.5, GROUPS: 7.5, COPIES: 9.0}, {ONE, GROUPS}),
        ({ONE: 2.5, GROUPS: 7.4}, {ONE: 2.5, GROUPS: 7.4}, None),
        ({ONE: 2.5, CAPTURED[1]: 2.1}, {ONE: 2.5, CAPTURED[1]: 2.0}, None),
        ({ONE: 6.4, GROUPS: 5.7}, {ONE: 1.5, GROUPS: 3.5}, None),
    ],
)
def test_what_the_host_makes_fast_or_slow_is_compared_again(
    medians: dict[Way, float], launches_ms: dict[Way, float], compared: set[Way] | None
) -> None:
    calibration = Calibration(list(medians))
    assert calibration.add_second_comparison(medians, launches_ms) == (compared is not None)
    if compared is not None:
        assert set(calibration.ways) == compared


def test_the_launches_of_all_steps_count_the_second_time() -> None:
    """As seen on two GPUs: four steps of 5.7 ms, and then some of such and more of 9, in any order."""
    calibration = Calibration([ONE, GROUPS])
    calibration.note_launches(GROUPS, 50.0)  # before: the step that warms up
    for way, taken_ms, host_ms in ((ONE, 6.4, 1.5), (GROUPS, 5.7, 5.3)):
        calibration.note(way, taken_ms, host_ms)
    first = measured(calibration)
    assert choose(first) == GROUPS
    assert calibration.add_second_comparison(first, calibration.launches_ms)
    steps = list(iter(calibration.next, None))
    for number, trial in enumerate(steps):
        is_fast = number < len(steps) // 4
        calibration.note_launches(trial.way, 1.5 if trial.way == ONE else 5.3 if is_fast else 9.3)
        if trial.is_timed:
            calibration.note(trial.way, 6.6 if trial.way == ONE else 5.7, 0.0)
    second = measured(calibration)
    assert second[ONE] == 6.6
    assert second[GROUPS] == pytest.approx(9.3 - (9.3 - 5.3) / 4, rel=0.05), (
        "their mean: what they cost in the long run"
    )
    assert choose(second) == ONE


def test_what_is_far_behind_is_out_of_it() -> None:
    calibration = Calibration([ONE, COPIES, *CAPTURED[::2]])
    first = {ONE: 35.0, COPIES: 34.0, CAPTURED[0]: 40.0, CAPTURED[2]: 33.0}
    for way, taken_ms in first.items():
        calibration.note(way, 29.0 if way == COPIES else taken_ms, 34.0 if way == COPIES else 3.0)
    assert measured(calibration) == first
    assert calibration.add_second_comparison(first, calibration.launches_ms)
    assert calibration.ways == [CAPTURED[2], COPIES, ONE]
    for way, taken_ms in ((CAPTURED[2], 33.5), (COPIES, 34.5), (ONE, 36.0)):
        calibration.note(way, taken_ms, 3.0)
        calibration.note_launches(way, 3.0)
    assert calibration.medians_ms() == [33.5, 34.5, 36.0]
