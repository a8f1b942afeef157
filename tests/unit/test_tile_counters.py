"""Which numbers streams wait for (`crossfade.ops.signaled.counters`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from crossfade.errors import DeviceError
from crossfade.ops.signaled.counters import Counters, num_counter_words
from crossfade.ops.signaled.tiles import TilePlan, even_blocks, plan_tiles


class Recorder:
    """A driver that notes what is enqueued."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ranges: dict[int, str] = {}

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        self.ranges[address] = label

    def write_value(self, *args: int) -> None:
        self.calls.append(("write", *args))

    def write_values(self, *args: Any) -> None:
        self.calls.append(("write all", *args))

    def wait_value(self, *args: int) -> None:
        self.calls.append(("wait", *args))

    def wait_and_reset(self, *args: int) -> None:
        self.calls.append(("wait and reset", *args))


class Words:
    """Where the counters would lie."""

    def data_ptr(self) -> int:
        return 4096


@pytest.fixture
def plan() -> TilePlan:
    return plan_tiles(40, even_blocks(64, 2), 0, tile_rows=16, tile_columns=32, num_rounds=2)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def counters(plan: TilePlan, recorder: Recorder) -> Counters:
    driver: Any = recorder
    words: Any = Words()
    return Counters(driver, plan, words, 16)


def test_an_eager_number_grows_with_each_launch_of_its_stretch(
    plan: TilePlan, recorder: Recorder, counters: Counters
) -> None:
    others = plan.stretches[2]
    (piece,) = others.pieces
    address = 4096 + 64 * piece.counter
    for number in (1, 2, 3):
        counters.note(others, is_captured=False)
        counters.wait(7, piece, is_captured=False)
        assert recorder.calls[-1] == ("wait", 7, address, number * piece.num_tiles)
    assert counters.row(is_captured=False) == 4096


def test_an_eager_number_wraps_around(plan: TilePlan, recorder: Recorder, counters: Counters) -> None:
    piece = plan.stretches[0].pieces[0]
    counters._launches[0] = (1 << 32) // piece.num_tiles
    counters.note(plan.stretches[0], is_captured=False)
    counters.wait(7, piece, is_captured=False)
    assert recorder.calls[-1][-1] == piece.num_tiles


def test_a_replayed_number_is_constant_and_reset(plan: TilePlan, recorder: Recorder, counters: Counters) -> None:
    piece = plan.stretches[2].pieces[0]
    row = counters.row(is_captured=True)
    assert row == 4096 + 64 * len(plan.pieces)
    counters.note(plan.stretches[2], is_captured=True)
    for _ in range(2):
        counters.wait(7, piece, is_captured=True)
        assert recorder.calls[-1] == ("wait and reset", 7, row + 64 * piece.counter, piece.num_tiles, 0)
    with pytest.raises(DeviceError):  # a launch that was captured has not happened
        counters.wait(7, piece, is_captured=False)


def test_a_piece_is_not_waited_for_before_it_is_launched(plan: TilePlan, counters: Counters) -> None:
    counters.note(plan.stretches[0], is_captured=False)
    with pytest.raises(DeviceError, match=r"piece 2 is waited for before it is launched\nhint"):
        counters.wait(7, plan.stretches[2].pieces[0], is_captured=False)


def test_counters_do_not_overlap(plan: TilePlan, recorder: Recorder, counters: Counters) -> None:
    addresses = sorted(recorder.ranges)
    assert len(addresses) == 2 * len(plan.pieces)
    assert all(second - first == 64 for first, second in pairwise(addresses))
    assert addresses[-1] + 64 <= 4096 + 4 * num_counter_words(plan, 16)
    assert "replayed counter of piece 3 (rank 0, round 1)" in recorder.ranges.values()
