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
from crossfade.ops.signaled.tiles import ENTRY_WORDS, Block, Tile, TilePlan, even_blocks, plan_tiles, uneven_blocks


@st.composite
def plans(draw: st.DrawFn) -> TilePlan:
    num_ranks = draw(st.integers(1, 5))
    if draw(st.booleans()):
        blocks = even_blocks(draw(st.integers(1, 400)), num_ranks)
    else:
        blocks = uneven_blocks(draw(st.lists(st.integers(0, 120), min_size=num_ranks, max_size=num_ranks)))
    return plan_tiles(
        draw(st.integers(1, 100)),
        blocks,
        draw(st.integers(0, num_ranks - 1)),
        tile_rows=draw(st.sampled_from([4, 8, 16])),
        tile_columns=draw(st.sampled_from([8, 16, 32])),
        piece_rows=draw(st.none() | st.integers(1, 60)),
        num_rounds=draw(st.integers(1, 5)),
        lag=draw(st.integers(0, 3)),
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
    at = 0
    for piece in plan.pieces:
        assert piece.first_tile == at
        assert piece.num_tiles > 0
        own = tiles[piece.first_tile : piece.end_tile]
        assert all(piece.begin <= tile.row < tile.row_end <= piece.end for tile in own)
        assert {tile.piece for tile in own} == {piece.counter}
        at = piece.end_tile
    assert at == len(tiles)


@given(plans())
def test_a_piece_lies_in_one_block_and_blocks_come_in_order(plan: TilePlan) -> None:
    for piece in plan.pieces:
        block = plan.blocks[piece.rank]
        assert block.begin <= piece.begin < piece.end <= block.end
        assert (piece.begin - block.begin) % plan.tile_rows == 0
    for rank in range(len(plan.blocks)):
        rows = [(piece.begin, piece.end) for piece in plan.pieces if piece.rank == rank]
        assert rows == sorted(rows)
        assert sum(end - begin for begin, end in rows) == plan.blocks[rank].end - plan.blocks[rank].begin


@given(plans())
def test_two_stretches_a_round_hold_all_pieces(plan: TilePlan) -> None:
    assert len(plan.stretches) == 2 * plan.num_rounds
    assert [piece for stretch in plan.stretches for piece in stretch.pieces] == list(plan.pieces)
    at = 0
    for index, stretch in enumerate(plan.stretches):
        assert stretch.place == index
        assert stretch.first_tile == at
        assert stretch.num_tiles == sum(piece.num_tiles for piece in stretch.pieces)
        assert all((piece.rank == plan.rank) is stretch.is_own for piece in stretch.pieces)
        assert all(piece.round == stretch.round for piece in stretch.pieces)
        assert plan.stretch(stretch.round, is_own=stretch.is_own) is stretch
        at = stretch.end_tile
    assert plan.num_tiles == at


@given(plans())
def test_the_own_block_of_a_round_comes_behind_the_others(plan: TilePlan) -> None:
    places = {(stretch.round, stretch.is_own): stretch.place for stretch in plan.stretches}
    order = [(stretch.round, stretch.is_own) for stretch in plan.stretches]
    for is_own in (False, True):
        assert [number for number, own in order if own is is_own] == list(range(plan.num_rounds))
    is_last = order[0] == (0, False)
    assert all((places[number, True] > places[number, False]) is is_last for number in range(plan.num_rounds))


@given(plans())
def test_the_table_is_the_tiles(plan: TilePlan) -> None:
    table = plan.table
    assert table.itemsize == 4
    words = zip(*[iter(table)] * ENTRY_WORDS, strict=True)
    assert [Tile(*entry) for entry in words] == list(plan.tiles())


@given(plans(), st.integers(1, 60))
def test_pieces_of_a_run_are_even_and_not_longer_than_asked(plan: TilePlan, piece_rows: int) -> None:
    again = plan_tiles(plan.num_columns, plan.blocks, plan.rank, tile_rows=plan.tile_rows, piece_rows=piece_rows)
    limit = max(piece_rows // plan.tile_rows, 1)
    for rank in range(len(plan.blocks)):
        heights = [-(-(p.end - p.begin) // plan.tile_rows) for p in again.pieces if p.rank == rank]
        assert not heights or max(heights) - min(heights) <= 1
        assert all(height <= limit for height in heights)


def test_the_order_of_a_round_with_the_own_block_last() -> None:
    plan = plan_tiles(256, even_blocks(1024, 4), 1, num_rounds=2)
    assert [(piece.round, piece.rank) for piece in plan.pieces] == [
        (0, 2), (0, 3), (0, 0), (0, 1), (1, 2), (1, 3), (1, 0), (1, 1),
    ]  # fmt: skip
    assert [(piece.begin, piece.end) for piece in plan.pieces][:4] == [(512, 640), (768, 896), (0, 128), (256, 384)]


def test_the_own_block_may_come_rounds_later() -> None:
    plan = plan_tiles(256, even_blocks(1024, 2), 0, num_rounds=4, lag=1)
    assert [(stretch.round, stretch.is_own) for stretch in plan.stretches] == [
        (0, False), (1, False), (0, True), (2, False), (1, True), (3, False), (2, True), (3, True),
    ]  # fmt: skip


def test_a_swath_goes_along_the_columns() -> None:
    plan = plan_tiles(24, even_blocks(12, 1), 0, tile_rows=4, tile_columns=8, swath=2)
    assert [(tile.row, tile.column) for tile in plan.tiles()] == [
        (0, 0), (4, 0), (0, 1), (4, 1), (0, 2), (4, 2), (8, 0), (8, 1), (8, 2),
    ]  # fmt: skip


def test_edges() -> None:
    plan = plan_tiles(300, even_blocks(500, 4), 0)
    assert [(block.begin, block.end) for block in plan.blocks] == [(0, 125), (125, 250), (250, 375), (375, 500)]
    assert [piece.num_tiles for piece in plan.pieces] == [2, 2, 2, 2]
    assert even_blocks(3, 4) == [Block(0, 0, 1), Block(1, 1, 2), Block(2, 2, 3), Block(3, 3, 3)]
    assert uneven_blocks([2, 0, 3]) == [Block(0, 0, 2), Block(1, 2, 2), Block(2, 2, 5)]
    empty = plan_tiles(8, uneven_blocks([0, 0]), 0)
    assert (empty.num_tiles, empty.pieces, len(empty.stretches)) == (0, (), 2)


def test_what_makes_no_sense_is_refused() -> None:
    blocks = even_blocks(64, 2)
    with pytest.raises(ValueError, match=r"swath is 0\nhint"):
        plan_tiles(8, blocks, 0, swath=0)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        plan_tiles(8, blocks, 2)
    with pytest.raises(ValueError, match="block 1 is"):
        plan_tiles(8, [blocks[0], Block(1, 40, 64)], 0)
    with pytest.raises(ValueError, match="rank 1 gets -1 rows"):
        uneven_blocks([1, -1])
    with pytest.raises(ValueError, match="a lag of -1"):
        plan_tiles(8, blocks, 0, lag=-1)
    with pytest.raises(ValueError, match="no round 3"):
        plan_tiles(8, blocks, 0).stretch(3, is_own=True)
    with pytest.raises(ValueError, match="blocks for 0 ranks"):
        even_blocks(4, 0)


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
