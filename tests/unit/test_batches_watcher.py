"""What of a choice is watched, on one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")

from crossfade.batches.choice import watch
from crossfade.batches.choice.calibration import LEAST_GAIN, Moves, Way
from crossfade.batches.choice.watch import LEAST_STEPS, WINDOW_MS, Backoff, Watcher, loop_us

ONE, GROUPS, COPIES = (Way(moves) for moves in Moves)
CAPTURED = Way(Moves.ONE, is_captured=True)
FAST_US, SLOW_US = 11.0, 17.0


class Votes:
    """Of this rank and one that votes ``other``."""

    other = False
    is_over = False

    def __init__(self) -> None:
        self._before: bool | None = None

    def vote(self, *, says_yes: bool) -> bool | None:
        before, self._before = self._before, says_yes or self.other
        return None if self.is_over else before


class Host:
    """One rank's watcher, and how long a loop takes on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ways: Sequence[Way] = (ONE, GROUPS, COPIES)) -> None:
        self.votes, self.taken_us, self.now_s = Votes(), SLOW_US, 0.0
        monkeypatch.setattr(watch, "loop_us", lambda: self.taken_us)
        monkeypatch.setattr(watch, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        agreement: Any = SimpleNamespace(has_group=True, votes=lambda: self.votes)
        self.watcher = Watcher(agreement, ways)

    def begin(
        self, chosen: Way, times_ms: Mapping[Way, float], launches_ms: Mapping[Way, float], own_ms: float | None = None
    ) -> None:
        """Ways are measured, and one is chosen. ``own_ms``: this rank's launches of interleaved ways, if not the slowest ones."""
        for way in times_ms:
            for _ in range(8):
                self.watcher.note_measured(way)
        own = {way: launches if own_ms is None or way == ONE else own_ms for way, launches in launches_ms.items()}
        self.watcher.begin(chosen, times_ms, launches_ms, own, LEAST_GAIN)

    @property
    def window(self) -> int:
        """How many steps it has."""
        assert self.watcher._watch is not None
        return self.watcher._watch.window

    def num_until_changed(self, most: int = 200, step_ms: float = 6.6) -> int | None:
        """How many steps it takes; None for more than ``most``."""
        for number in range(1, most + 1):
            self.now_s += step_ms / 1e3
            if self.watcher.has_changed():
                return number
        return None


SLOW_HOST = {ONE: 6.6, GROUPS: 9.6, COPIES: 9.2}, {ONE: 1.9, GROUPS: 9.6, COPIES: 9.1}
FAST_HOST = {ONE: 6.6, GROUPS: 5.9, COPIES: 5.6}, {ONE: 1.3, GROUPS: 5.6, COPIES: 5.4}
WINDOW = math.ceil(WINDOW_MS / 6.6)


def test_one_batch_is_watched_for_a_host_that_becomes_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.begin(ONE, *SLOW_HOST)
    assert host.watcher.counter is None, "launches of one batch do not tell"
    assert host.num_until_changed() is None
    host.taken_us = FAST_US
    changed = host.num_until_changed()
    assert changed is not None
    assert changed <= 2 * WINDOW + WINDOW // 2
    assert not host.watcher.is_on
    assert host.watcher.ways == [ONE, GROUPS, COPIES]


@pytest.mark.parametrize(("launches_ms", "loop_is"), [(6.8, 0.9), (7.6, 0.85), (9.2, 0.75), (12.5, 0.75)])
def test_the_less_a_host_has_to_become_faster_the_smaller_a_change_is_enough(
    launches_ms: float, loop_is: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(monkeypatch)
    times = {ONE: 6.6, COPIES: launches_ms}
    host.begin(ONE, times, times | {ONE: 1.9})
    host.taken_us = 1.01 * loop_is * SLOW_US
    assert host.num_until_changed() is None
    host.taken_us = 0.99 * loop_is * SLOW_US
    assert host.num_until_changed() is not None


def test_a_rank_whose_host_is_still_slow_keeps_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.begin(ONE, *SLOW_HOST)
    host.taken_us, host.votes.other = FAST_US, True
    assert host.num_until_changed() is None
    host.votes.other = False
    assert host.num_until_changed() is not None


def test_a_rank_that_is_not_to_blame_does_not_keep_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loops take as long as they did."""
    host = Host(monkeypatch)
    host.taken_us = FAST_US
    host.begin(ONE, *SLOW_HOST, own_ms=5.5)
    assert host.num_until_changed() == 2 * WINDOW


@pytest.mark.parametrize(
    ("chosen", "times_ms", "launches_ms", "ways"),
    [
        # no host is so much faster
        (ONE, {ONE: 2.5, GROUPS: 7.6}, {ONE: 2.4, GROUPS: 7.6}, [ONE, GROUPS]),
        # the GPU is what takes the time
        (ONE, {ONE: 78.0, GROUPS: 79.0}, {ONE: 40.0, GROUPS: 48.0}, [ONE, GROUPS]),
        (ONE, {ONE: 10.0, GROUPS: 11.0}, {ONE: 4.0, GROUPS: 9.0}, [ONE, GROUPS]),
        (GROUPS, {ONE: 33.0, GROUPS: 30.0}, {ONE: 5.0, GROUPS: 14.0}, [ONE, GROUPS]),
        # what the host costs is away in a captured one
        (CAPTURED, {ONE: 6.6, CAPTURED: 6.5}, {ONE: 1.9, CAPTURED: 0.1}, [ONE, GROUPS, CAPTURED]),
        (
            ONE,
            {ONE: 6.5, GROUPS: 9.6, CAPTURED: 6.6},
            {ONE: 1.9, GROUPS: 9.6, CAPTURED: 0.1},
            [ONE, GROUPS, CAPTURED],
        ),
    ],
)
def test_what_no_other_host_would_change_is_not_watched(
    chosen: Way,
    times_ms: dict[Way, float],
    launches_ms: dict[Way, float],
    ways: list[Way],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch, ways)
    host.begin(chosen, times_ms, launches_ms)
    assert not host.watcher.is_on


def test_the_way_that_a_faster_host_would_make_the_fastest_is_the_one_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one has fewer launches, and is bound by them, but they are not why it is slow."""
    host = Host(monkeypatch)
    host.begin(ONE, {ONE: 6.6, GROUPS: 7.0, COPIES: 9.0}, {ONE: 1.9, GROUPS: 5.0, COPIES: 9.0})
    host.taken_us = FAST_US
    assert host.num_until_changed() is not None


def test_nothing_is_watched_when_the_votes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.begin(ONE, *SLOW_HOST)
    host.taken_us, host.votes.is_over = FAST_US, True
    assert host.num_until_changed() is None
    assert not host.watcher.is_on
    assert host.watcher.is_over


def test_a_captured_way_that_one_batch_loses_to_is_what_launches_are_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(monkeypatch, [ONE, GROUPS, CAPTURED])
    assert host.watcher.ways == [ONE, GROUPS], "of a captured one, the graph is gone"
    host.begin(GROUPS, {GROUPS: 5.9, CAPTURED: 6.1}, {GROUPS: 5.6, CAPTURED: 0.1})
    counter = host.watcher.counter
    assert counter is not None
    for _ in range(4 * WINDOW):
        counter.note_launches(GROUPS, 6.2)
        if host.watcher.has_changed():
            return
    raise AssertionError("6.2 ms are longer than the captured one")


def test_an_interleaved_choice_is_watched_by_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.begin(COPIES, *FAST_HOST)
    counter = host.watcher.counter
    assert counter is not None
    num_fast, number = 60, 0
    for host_ms in [5.4] * num_fast + [9.2] * num_fast:
        number += 1
        if host.watcher.has_changed():
            break
        counter.note_launches(COPIES, host_ms)
    assert num_fast < number <= num_fast + 3 * math.ceil(WINDOW_MS / 5.6)


def test_windows_become_longer_where_the_choice_stays_or_does_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    for number in (0, 1, 2):
        host.taken_us = SLOW_US
        host.begin(ONE, *SLOW_HOST)
        assert host.window == WINDOW << number
        host.taken_us = FAST_US
        assert host.num_until_changed(3 * WINDOW << number) is not None
        host.begin(COPIES, *FAST_HOST)
        host.votes.other = True  # the other rank's host is slow
        assert host.num_until_changed(3 * WINDOW) == 2 * math.ceil(WINDOW_MS / 5.6)
        host.votes.other = False
    assert host.watcher.num_again == 6


def test_windows_of_one_batch_become_short_again_when_an_interleaved_choice_has_lasted() -> None:
    backoff = Backoff()
    for _ in range(20):
        backoff.note(was_single=False, is_single=True, num_windows=2)
    assert backoff.num_doublings(is_single=True) == 6, "at most"
    backoff.note(was_single=False, is_single=False, num_windows=2)
    backoff.note(was_single=True, is_single=False, num_windows=2)
    assert [backoff.num_doublings(is_single=single) for single in (False, True)] == [1, 6]
    backoff.note(was_single=False, is_single=True, num_windows=8)
    assert [backoff.num_doublings(is_single=single) for single in (False, True)] == [0, 0]


def test_a_loop_takes_longer_when_it_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    short = min(loop_us() for _ in range(50))
    monkeypatch.setattr(watch, "_LOOP_LENGTH", 3000)
    assert min(loop_us() for _ in range(50)) > 4 * short


def test_a_window_has_some_steps_however_long_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.begin(ONE, {ONE: 660.0, GROUPS: 960.0}, {ONE: 190.0, GROUPS: 960.0})
    assert host.window == LEAST_STEPS
