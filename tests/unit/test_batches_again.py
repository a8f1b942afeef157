"""Ways of a step that may be as fast as the fastest one, or are fast as long as the host is, are compared a second time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from crossfade.batches.choice.calibration import WARM_MS, Calibration, Moves, Trial, Way, choose

ONE, GROUPS, COPIES = (Way(moves) for moves in Moves)
CAPTURED = [Way(moves, is_captured=True) for moves in Moves]


def no_launches(ways: Iterable[Way]) -> dict[Way, float]:
    return dict.fromkeys(ways, 0.0)


def launches(calibration: Calibration) -> dict[Way, float]:
    return dict(zip(calibration.ways, calibration.launches_ms(), strict=True))


def measured(calibration: Calibration) -> dict[Way, float]:
    return dict(zip(calibration.ways, calibration.times_ms(), strict=True))


def rows_of(calibration: Calibration) -> list[list[Trial]]:
    """The steps that are left, each row by itself."""
    rows = list[list[Trial]]()
    for trial in iter(calibration.next, None):
        if trial.begins_idle:
            rows.append([])
        rows[-1].append(trial)
    return rows


def test_ways_that_are_close_are_timed_again_when_the_gpu_is_warm() -> None:
    """As seen on two GPUs at their power limit: process groups looked faster in the first steps, and were not in those to come."""
    calibration = Calibration([ONE, GROUPS, COPIES])
    while (trial := calibration.next()) is not None:
        if trial.is_timed:
            calibration.note(trial.way, {ONE: 60.4, GROUPS: 56.85, COPIES: 57.01}[trial.way], 10.0)
    first = measured(calibration)
    assert choose(first) == GROUPS
    assert calibration.add_second_comparison(first, launches(calibration))
    rows = rows_of(calibration)
    ways = [row[0].way for row in rows]
    assert ways[:6] == [GROUPS, COPIES, ONE, ONE, COPIES, GROUPS], "each way, in turns"
    assert all([trial.begins_idle for trial in row] == [True] + [False] * (len(row) - 1) for row in rows)
    warm = [row for row in rows if not any(trial.is_timed for trial in row)]
    assert rows[: len(warm)] == warm
    assert sum(first[row[0].way] * len(row) for row in warm) >= WARM_MS
    assert len({sum(len(row) for row in warm if row[0].way == way) for way in (ONE, GROUPS, COPIES)}) == 1
    last = rows[len(warm) :]
    assert {ways.count(way) for way in (ONE, GROUPS, COPIES)} == {len(rows) // 3}
    assert Counter(row[0].way for row in last) == {ONE: 2, GROUPS: 2, COPIES: 2}, "one batch, to compare with"
    for row in last:
        half = len(row) // 2
        assert half * 57.01 >= 500, "half a second"
        assert [trial.is_timed for trial in row] == [False] * half + [True] * half
        assert [trial.lines_up for trial in row] == [k == half - 1 for k in range(len(row))]
    timed = [trial.way for row in last for trial in row if trial.is_timed]
    for way in timed:
        calibration.note(way, {ONE: 63.4, GROUPS: 60.6, COPIES: 59.4}[way], 10.0)
    second = measured(calibration)
    assert second == {ONE: 63.4, GROUPS: 60.6, COPIES: 59.4}
    assert choose(second) == COPIES
    assert not calibration.add_second_comparison(second, launches(calibration)), "once"
    assert calibration.next() is None


@pytest.mark.parametrize(
    ("medians", "again"),
    [
        ({ONE: 10.0, GROUPS: 9.0}, None),
        ({ONE: 10.0, GROUPS: 9.6}, {GROUPS: 40, ONE: 40}),
        ({ONE: 100.0, GROUPS: 99.0}, {GROUPS: 10, ONE: 10}),
        ({ONE: 300.0, GROUPS: 299.0}, {GROUPS: 8, ONE: 8}),
        ({ONE: 0.73, GROUPS: 0.65, COPIES: 0.91}, {GROUPS: 40, ONE: 40}),
        ({ONE: math.inf, GROUPS: math.inf}, None),
        ({ONE: 0.5, CAPTURED[0]: 0.35, GROUPS: 1.0, CAPTURED[1]: 0.65}, None),
    ],
)
def test_only_what_is_close_is_timed_again(medians: dict[Way, float], again: dict[Way, int] | None) -> None:
    calibration = Calibration(list(medians))
    for _ in iter(calibration.next, None):
        pass
    assert calibration.add_second_comparison(medians, no_launches(medians)) == (again is not None)
    assert Counter(trial.way for trial in iter(calibration.next, None) if trial.is_timed) == (again or {})


@pytest.mark.parametrize(
    ("medians", "launches_ms", "compared"),
    [
        ({ONE: 6.4, GROUPS: 5.7, COPIES: 8.9}, {ONE: 1.5, GROUPS: 5.3, COPIES: 8.9}, {ONE, GROUPS, COPIES}),
        ({ONE: 6.4, GROUPS: 5.7, COPIES: 8.9}, {ONE: 1.5, GROUPS: 3.5, COPIES: 8.9}, None),
        ({ONE: 15.3, GROUPS: 13.9, COPIES: 16.5}, {ONE: 4.4, GROUPS: 12.2, COPIES: 14.7}, {ONE, GROUPS, COPIES}),
        ({ONE: 6.4, GROUPS: 7.5, COPIES: 9.0}, {ONE: 1.5, GROUPS: 7.5, COPIES: 9.0}, {ONE, GROUPS}),
        ({ONE: 32.9, GROUPS: 30.8, COPIES: 40.2}, {ONE: 24.3, GROUPS: 27.8, COPIES: 40.2}, {ONE, GROUPS, COPIES}),
        ({ONE: 2.5, GROUPS: 7.4}, {ONE: 2.5, GROUPS: 7.4}, None),
        ({ONE: 2.5, CAPTURED[1]: 2.1}, {ONE: 2.5, CAPTURED[1]: 2.0}, None),
        ({ONE: 6.4, GROUPS: 5.7}, {ONE: 1.5, GROUPS: 3.5}, None),
        # a captured way does not become slower with the host, so the same one need not be measured on a faster host
        ({ONE: 32.8, GROUPS: 31.3, CAPTURED[1]: 28.9}, {ONE: 26.8, GROUPS: 28.9, CAPTURED[1]: 24.1}, None),
        (
            {ONE: 32.8, GROUPS: 29.4, CAPTURED[1]: 29.5},
            {ONE: 26.8, GROUPS: 26.0, CAPTURED[1]: 24.1},
            {ONE, GROUPS, CAPTURED[1]},
        ),
    ],
)
def test_what_the_host_makes_fast_or_slow_is_compared_again(
    medians: dict[Way, float], launches_ms: dict[Way, float], compared: set[Way] | None
) -> None:
    calibration = Calibration(list(medians))
    assert calibration.add_second_comparison(medians, launches_ms) == (compared is not None)
    if compared is not None:
        assert set(calibration.ways) == compared


def second_of(
    calibration: Calibration, host_ms: Callable[[Way, float], float], gpu_ms: Callable[[Way, float], float]
) -> dict[Way, float]:
    """What a second comparison finds where launches and the GPU take so long, by the way and the share of it that is over."""
    steps = list(iter(calibration.next, None))
    for number, trial in enumerate(steps):
        share = number / len(steps)
        if trial.counts_launches:
            calibration.note_launches(trial.way, host_ms(trial.way, share))
        if trial.is_timed:
            calibration.note(trial.way, gpu_ms(trial.way, share), host_ms(trial.way, share))
    return measured(calibration)


def with_first(first: dict[Way, tuple[float, float]], num_not_replayed: int = 0) -> Calibration:
    """One whose first steps took so long: the GPU, and the launches."""
    calibration = Calibration(list(first))
    for _ in iter(calibration.next, None):
        pass
    for way, (gpu_ms, host_ms) in first.items():
        calibration.note(way, gpu_ms, host_ms, num_not_replayed)
    return calibration


def test_the_launches_of_all_steps_count_the_second_time() -> None:
    """As seen on two GPUs: four steps of 5.7 ms, and then some of such and more of 9."""
    calibration = with_first({ONE: (6.4, 1.5), GROUPS: (5.7, 5.3)})
    first = measured(calibration)
    assert choose(first) == GROUPS
    assert calibration.add_second_comparison(first, launches(calibration))
    second = second_of(
        calibration,
        lambda way, share: 1.5 if way == ONE else 5.3 if share < 0.25 else 9.3,
        lambda way, _: 6.6 if way == ONE else 5.7,
    )
    assert second[ONE] == 6.6
    assert second[GROUPS] == pytest.approx(9.3 - (9.3 - 5.3) / 4, rel=0.05), (
        "their mean: what they cost in the long run"
    )
    assert choose(second) == ONE


def test_a_host_that_is_slow_while_steps_are_timed_does_not_decide() -> None:
    calibration = with_first({ONE: (6.4, 1.5), GROUPS: (5.7, 5.3)})
    assert calibration.add_second_comparison(measured(calibration), launches(calibration))
    second = second_of(
        calibration,
        lambda way, share: 1.5 if way == ONE else 5.3 if share < 0.995 else 9.3,
        lambda way, share: 6.4 if way == ONE else 5.7 if share < 0.995 else 9.7,
    )
    assert second == {ONE: 6.4, GROUPS: 5.7}


def test_steps_that_capture_collectives_do_not_count_the_second_time_either() -> None:
    calibration = with_first({ONE: (6.4, 1.5), COPIES: (5.7, 5.3)})
    assert calibration.add_second_comparison(measured(calibration), launches(calibration))
    calibration.note_launches(COPIES, 90.0, 16)
    assert launches(calibration)[COPIES] == 5.3
    for host_ms in (5.5, 90.0, 5.7):
        calibration.note_launches(COPIES, host_ms)
    assert launches(calibration)[COPIES] == pytest.approx(5.6), (
        "without the slowest, in which the program may have paused"
    )


def test_launches_of_the_first_row_of_each_way_do_not_count() -> None:
    calibration = with_first({ONE: (6.4, 1.5), GROUPS: (5.7, 5.3)})
    assert calibration.add_second_comparison(measured(calibration), launches(calibration))
    rows = rows_of(calibration)
    assert [all(trial.counts_launches for trial in row) for row in rows] == [False] * 2 + [True] * (len(rows) - 2)
    assert not any(trial.counts_launches for row in rows[:2] for trial in row)


@pytest.mark.parametrize("step_ms", [0.05, 0.35, 5.0, 60.0, 600.0, 2000.0, 9000.0])
def test_ways_take_turns_for_eight_seconds_or_one_row_each(step_ms: float) -> None:
    calibration = with_first({ONE: (step_ms, 0.0), GROUPS: (step_ms, 0.0), COPIES: (step_ms, 0.0)})
    assert calibration.add_second_comparison(measured(calibration), launches(calibration))
    warm = [row for row in rows_of(calibration) if not row[-1].is_timed]
    a_round_ms = sum(len(row) for row in warm[:3]) * step_ms
    assert WARM_MS <= sum(len(row) for row in warm) * step_ms <= WARM_MS + a_round_ms
    assert a_round_ms < 3 * (500 + step_ms)


def test_what_is_far_behind_is_out_of_it() -> None:
    first = {ONE: 35.0, COPIES: 34.0, CAPTURED[0]: 40.0, CAPTURED[2]: 33.0}
    calibration = with_first({way: (29.0, 34.0) if way == COPIES else (taken, 3.0) for way, taken in first.items()})
    assert measured(calibration) == first
    assert calibration.add_second_comparison(first, launches(calibration))
    assert calibration.ways == [CAPTURED[2], COPIES, ONE]
    again = {CAPTURED[2]: 33.5, COPIES: 34.5, ONE: 36.0}
    assert second_of(calibration, lambda *_: 3.0, lambda way, _: again[way]) == again
