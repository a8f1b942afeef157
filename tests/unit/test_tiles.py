"""How a product is cut into tiles, pieces and counters, and which numbers streams wait for."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import DeviceError
from crossfade.ops.signaled.counters import Counters, num_counter_words
from crossfade.ops.signaled.tiles import ENTRY_WORDS, Tile, TilePlan, plan_tiles


@st.composite
def plans(draw: st.DrawFn) -> TilePlan:
    return plan_tiles(
        draw(st.integers(0, 400)),
        draw(st.integers(1, 100)),
        piece_rows=draw(st.integers(1, 60)),
        tile_rows=draw(st.sampled_from([4, 8, 16])),
        tile_columns=draw(st.sampled_from([8, 16, 32])),
        swath=draw(st.integers(1, 9)),
    )


@given(plans())
def test_every_element_is_in_one_tile(plan: TilePlan) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for tile in plan.tiles():
        assert 0 < tile.row_end - tile.row <= plan.tile_rows
        for row in range(tile.row, tile.row_end):
            seen[row, tile.column] += 1
    across = -(-plan.num_columns // plan.tile_columns)
    assert seen == Counter({(row, column): 1 for row in range(plan.num_rows) for column in range(across)})


@given(plans())
def test_pieces_are_whole_before_the_next_and_their_counters_exact(plan: TilePlan) -> None:
    tiles = list(plan.tiles())
    assert len(tiles) == plan.num_tiles
    assert [piece.counter for piece in plan.pieces] == list(range(len(plan.pieces)))
    at = row = 0
    for piece in plan.pieces:
        assert (piece.first_tile, piece.begin) == (at, row)
        assert piece.num_tiles > 0
        own = tiles[piece.first_tile : piece.end_tile]
        assert all(piece.begin <= tile.row < tile.row_end <= piece.end for tile in own)
        assert {tile.piece for tile in own} == {piece.counter}
        at, row = piece.end_tile, piece.end
    assert (at, row) == (len(tiles), plan.num_rows)


@given(plans())
def test_the_table_is_the_tiles(plan: TilePlan) -> None:
    table = plan.table
    assert table.itemsize == 4
    words = zip(*[iter(table)] * ENTRY_WORDS, strict=True)
    assert [Tile(*entry) for entry in words] == list(plan.tiles())


@given(plans(), st.integers(1, 60))
def test_pieces_are_even_and_not_longer_than_asked(plan: TilePlan, piece_rows: int) -> None:
    again = plan_tiles(plan.num_rows, plan.num_columns, piece_rows=piece_rows, tile_rows=plan.tile_rows)
    heights = [-(-(piece.end - piece.begin) // plan.tile_rows) for piece in again.pieces]
    assert not heights or max(heights) - min(heights) <= 1
    assert all(height <= max(piece_rows // plan.tile_rows, 1) for height in heights)


def test_a_swath_goes_along_the_columns() -> None:
    plan = plan_tiles(12, 24, piece_rows=12, tile_rows=4, tile_columns=8, swath=2)
    assert [(tile.row, tile.column) for tile in plan.tiles()] == [
        (0, 0), (4, 0), (0, 1), (4, 1), (0, 2), (4, 2), (8, 0), (8, 1), (8, 2),
    ]  # fmt: skip


def test_edges() -> None:
    plan = plan_tiles(500, 300, piece_rows=200)
    assert [(piece.begin, piece.end, piece.num_tiles) for piece in plan.pieces] == [
        (0, 128, 2), (128, 256, 2), (256, 384, 2), (384, 500, 2),
    ]  # fmt: skip
    empty = plan_tiles(0, 8, piece_rows=128)
    assert (empty.num_tiles, empty.pieces) == (0, ())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"swath is 0\nhint"):
        plan_tiles(64, 8, piece_rows=16, swath=0)
    with pytest.raises(ValueError, match="num_columns is 0, piece_rows is -1"):
        plan_tiles(64, 0, piece_rows=-1)


class Recorder:
    """A driver that notes what is enqueued."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ranges: dict[int, str] = {}

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        self.ranges[address] = label

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
    return plan_tiles(64, 40, piece_rows=16, tile_rows=16, tile_columns=32)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def counters(plan: TilePlan, recorder: Recorder) -> Counters:
    driver: Any = recorder
    words: Any = Words()
    return Counters(driver, plan, words)


def test_an_eager_number_grows_with_each_launch(plan: TilePlan, recorder: Recorder, counters: Counters) -> None:
    piece = plan.pieces[2]
    for number in (1, 2, 3):
        counters.note(is_captured=False)
        counters.wait(7, piece, is_captured=False)
        assert recorder.calls[-1] == ("wait", 7, 4096 + 64 * 2, number * piece.num_tiles)
    assert counters.row(is_captured=False) == 4096


def test_an_eager_number_wraps_around(plan: TilePlan, recorder: Recorder, counters: Counters) -> None:
    piece = plan.pieces[0]
    counters._num_launches = (1 << 32) // piece.num_tiles
    counters.note(is_captured=False)
    counters.wait(7, piece, is_captured=False)
    assert recorder.calls[-1][-1] == piece.num_tiles


def test_a_replayed_number_is_constant_and_reset(plan: TilePlan, recorder: Recorder, counters: Counters) -> None:
    piece = plan.pieces[2]
    row = counters.row(is_captured=True)
    assert row == 4096 + 64 * len(plan.pieces)
    counters.note(is_captured=True)
    for _ in range(2):
        counters.wait(7, piece, is_captured=True)
        assert recorder.calls[-1] == ("wait and reset", 7, row + 64 * piece.counter, piece.num_tiles, 0)
    with pytest.raises(DeviceError, match=r"piece 2 is waited for before it is launched\nhint"):
        counters.wait(7, piece, is_captured=False)  # a launch that was captured has not happened


def test_counters_do_not_overlap(plan: TilePlan, recorder: Recorder, counters: Counters) -> None:
    addresses = sorted(recorder.ranges)
    assert len(addresses) == 2 * len(plan.pieces)
    assert all(second - first == 64 for first, second in pairwise(addresses))
    assert addresses[-1] + 64 <= 4096 + 4 * num_counter_words(plan)
    assert "replayed counter of piece 3" in recorder.ranges.values()
