"""How a product of M x N elements is cut into tiles, pieces and counters, and in which order it is done. Pure.

W ranks, r this one; R rounds; a tile is BM x BN elements::

    product    M rows = a block for each rank
    block      rows that belong to one rank = R runs, one for each round
    stretch    what one launch does: the runs of the other ranks' blocks of a round, or the own one
    piece      rows of one run that are moved at once; has a counter, which waits for all its tiles
    tile       BM rows (fewer at the end of a piece) x BN columns (fewer at the end of a row)

A round does its run of every block, so that with R rounds the own rows of one round are on their way while the next one computes.
The order of blocks within a round follows the copies: r + 1, r + 2, ..., r. What is sent first is done first, and what others send
has arrived when it is added.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from crossfade.device.copies import stagger
from crossfade.ops.calls.products import in_order

ENTRY_WORDS = 4
"""int32 words of a tile in the table that the kernel reads: see `Tile`."""


class TileConfig(NamedTuple):
    """How the product kernel is built."""

    num_rows: int = 128  # num_rows, num_columns: of a tile; powers of two
    num_columns: int = 256
    depth: int = 64  # of one step
    num_warps: int = 8  # of a program
    num_stages: int = 3  # steps that are loaded ahead
    num_cuts: int = 0  # of a tile's columns, finished one by one: 1, 2 or 4; 0: 4 where parts are added, else 1


class Block(NamedTuple):
    """The rows that belong to one rank."""

    rank: int
    begin: int
    end: int


class Tile(NamedTuple):
    """One tile, as the table has it."""

    row: int  # its first
    row_end: int  # behind its last; fewer than a tile's rows at the end of a piece
    column: int  # its place in a row of tiles
    piece: int  # whose counter counts it


class Piece(NamedTuple):
    """Rows that are moved at once."""

    counter: int  # which is its
    rank: int  # whose block it belongs to
    round: int  # when it is done
    begin: int  # begin, end: its rows
    end: int
    first_tile: int  # first_tile, end_tile: its tiles in the table, which lie together
    end_tile: int

    @property
    def num_tiles(self) -> int:
        """What its counter waits for."""
        return self.end_tile - self.first_tile


class Stretch(NamedTuple):
    """What one launch does."""

    place: int  # among all stretches, in their order
    round: int
    is_own: bool  # it is this rank's run, and not those of all others
    first_tile: int  # first_tile, end_tile: its tiles in the table
    end_tile: int
    pieces: tuple[Piece, ...]  # whole ones, in the order in which they are done

    @property
    def num_tiles(self) -> int:
        """May be 0: a block can have fewer rows of tiles than there are rounds."""
        return self.end_tile - self.first_tile


def even_blocks(num_rows: int, num_ranks: int) -> list[Block]:
    """Blocks of ceil(M / W) rows; the last ones are shorter, or empty, where W does not divide M."""
    if num_ranks < 1:
        raise ValueError(f"blocks for {num_ranks} ranks\nhint: at least 1")
    length = -(-num_rows // num_ranks)
    return [Block(p, min(p * length, num_rows), min((p + 1) * length, num_rows)) for p in range(num_ranks)]


def uneven_blocks(counts: Sequence[int]) -> list[Block]:
    """Blocks of so many rows each, one behind the other."""
    blocks, begin = [], 0
    for rank, count in enumerate(counts):
        if count < 0:
            raise ValueError(f"rank {rank} gets {count} rows\nhint: counts are 0 or more")
        blocks.append(Block(rank, begin, begin + count))
        begin += count
    return blocks


def _shares(total: int, num_shares: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of shares that differ by 1 at most."""
    for share in range(num_shares):
        yield total * share // num_shares, total * (share + 1) // num_shares


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a product in the order in which they are done (see `plan_tiles`)."""

    num_rows: int  # num_rows, num_columns: M and N
    num_columns: int
    rank: int
    tile_rows: int  # tile_rows, tile_columns: BM and BN
    tile_columns: int
    swath: int  # rows of tiles that are done together
    num_rounds: int
    blocks: tuple[Block, ...]
    pieces: tuple[Piece, ...]  # by their counters
    stretches: tuple[Stretch, ...]  # in the order of their tiles; two a round

    @property
    def num_tiles(self) -> int:
        """Of the whole product."""
        return self.stretches[-1].end_tile if self.stretches else 0

    @property
    def own_block(self) -> Block:
        """This rank's."""
        return self.blocks[self.rank]

    def run(self, rank: int, round: int) -> tuple[int, int]:
        """(begin, end) of a rank's rows of a round."""
        pieces = list(_cut(self.blocks[rank], round, self.num_rounds, self.tile_rows, None))
        begin = self.blocks[rank].begin
        return pieces[0] if pieces else (begin, begin)

    def stretch(self, round: int, *, is_own: bool) -> Stretch:
        """One of the two stretches of a round."""
        for stretch in self.stretches:
            if stretch.round == round and stretch.is_own is is_own:
                return stretch
        raise ValueError(f"there is no round {round}\nhint: the plan has {self.num_rounds}")

    def tiles(self) -> Iterator[Tile]:
        """All tiles, piece by piece. Within a piece: swaths of rows of tiles; a swath goes along N, column of tiles by column.

        The programs that run at one time then share few rows of a and few columns of b, which stay in the L2 cache.
        """
        across = -(-self.num_columns // self.tile_columns)
        for piece in self.pieces:
            rows = range(piece.begin, piece.end, self.tile_rows)
            for first in range(0, len(rows), self.swath):
                for column in range(across):
                    for row in rows[first : first + self.swath]:
                        yield Tile(row, min(row + self.tile_rows, piece.end), column, piece.counter)

    @cached_property
    def table(self) -> array[int]:
        """The tiles as the kernel reads them: `ENTRY_WORDS` int32 words each."""
        return array("i", [word for tile in self.tiles() for word in tile])


def plan_tiles(
    num_columns: int,
    blocks: Sequence[Block],
    rank: int,
    *,
    tile_rows: int = 128,
    tile_columns: int = 256,
    piece_rows: int | None = None,
    num_rounds: int = 1,
    lag: int = 0,
    swath: int = 8,
) -> TilePlan:
    """Cuts a product.

    Runs and pieces are cut between rows of tiles, as evenly as that allows, so that at most the last tile of a block is not full.
    """
    _check(num_columns, blocks, rank, tile_rows, tile_columns, piece_rows, num_rounds, swath)
    if lag < 0:
        raise ValueError(f"a lag of {lag}\nhint: 0 or more")
    across = -(-num_columns // tile_columns)
    limit = None if piece_rows is None else max(piece_rows // tile_rows, 1)
    others = stagger(rank, len(blocks))
    pieces: list[Piece] = []
    stretches: list[Stretch] = []
    tile = 0
    for number, is_own in in_order(num_rounds, lag):
        first_piece, first_tile = len(pieces), tile
        for p in [rank] if is_own else others:
            for begin, end in _cut(blocks[p], number, num_rounds, tile_rows, limit):
                next_tile = tile + -(-(end - begin) // tile_rows) * across
                pieces.append(Piece(len(pieces), p, number, begin, end, tile, next_tile))
                tile = next_tile
        stretches.append(Stretch(len(stretches), number, is_own, first_tile, tile, tuple(pieces[first_piece:])))
    return TilePlan(
        num_rows=blocks[-1].end,
        num_columns=num_columns,
        rank=rank,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        swath=swath,
        num_rounds=num_rounds,
        blocks=tuple(blocks),
        pieces=tuple(pieces),
        stretches=tuple(stretches),
    )


def _cut(block: Block, number: int, num_rounds: int, tile_rows: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """The rows of the pieces of a block's run of one round."""
    num_tiles = -(-(block.end - block.begin) // tile_rows)
    low, high = num_tiles * number // num_rounds, num_tiles * (number + 1) // num_rounds
    if low == high:
        return
    num_pieces = 1 if limit is None else -(-(high - low) // limit)
    for first, end in _shares(high - low, num_pieces):
        rows = block.begin + (low + first) * tile_rows, block.begin + (low + end) * tile_rows
        yield rows[0], min(rows[1], block.end)


def _check(
    num_columns: int,
    blocks: Sequence[Block],
    rank: int,
    tile_rows: int,
    tile_columns: int,
    piece_rows: int | None,
    num_rounds: int,
    swath: int,
) -> None:
    numbers = {"tile_rows": tile_rows, "tile_columns": tile_columns, "num_rounds": num_rounds, "swath": swath}
    numbers |= {"num_columns": num_columns} | ({} if piece_rows is None else {"piece_rows": piece_rows})
    small = [f"{name} is {value}" for name, value in numbers.items() if value < 1]
    if small:
        raise ValueError(f"{', '.join(small)}\nhint: each is at least 1")
    if not 0 <= rank < len(blocks):
        raise ValueError(f"rank {rank} of {len(blocks)}\nhint: one block for each rank")
    begin = 0
    for p, block in enumerate(blocks):
        if block.rank != p or block.begin != begin or block.end < begin:
            raise ValueError(f"block {p} is {block}\nhint: blocks come in the order of the ranks, without gaps")
        begin = block.end
