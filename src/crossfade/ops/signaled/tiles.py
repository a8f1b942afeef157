"""How a product of M x N elements is cut into tiles, pieces and counters, and in which order it is done. Pure.

A tile is BM x BN elements::

    product    M rows = pieces, one behind the other
    piece      rows that are told of at once; has a counter, which waits for all its tiles
    tile       BM rows (fewer at the end of a piece) x BN columns (fewer at the end of a row)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

ENTRY_WORDS = 4
"""int32 words of a tile in the table that the kernel reads: see `Tile`."""
COUNTER_WORDS = 16
"""Distance of two counters in words of 32 bits: they share no cache line."""


class TileConfig(NamedTuple):
    """How the product kernel is built."""

    num_rows: int = 128  # num_rows, num_columns: of a tile; powers of two
    num_columns: int = 256
    depth: int = 64  # of one step
    num_warps: int = 8  # of a program
    num_stages: int = 3  # steps that are loaded ahead


class Tile(NamedTuple):
    """One tile, as the table has it."""

    row: int  # its first
    row_end: int  # behind its last; fewer than a tile's rows at the end of a piece
    column: int  # its place in a row of tiles
    piece: int  # whose counter counts it


class Piece(NamedTuple):
    """Rows that are told of at once."""

    counter: int  # which is its
    begin: int  # begin, end: its rows
    end: int
    first_tile: int  # first_tile, end_tile: its tiles in the table, which lie together
    end_tile: int

    @property
    def num_tiles(self) -> int:
        """What its counter waits for."""
        return self.end_tile - self.first_tile


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a product in the order in which they are done (see `plan_tiles`)."""

    num_rows: int  # num_rows, num_columns: M and N
    num_columns: int
    tile_rows: int  # tile_rows, tile_columns: BM and BN
    tile_columns: int
    swath: int  # rows of tiles that are done together
    pieces: tuple[Piece, ...]  # by their counters

    @property
    def num_tiles(self) -> int:
        """Of the whole product."""
        return self.pieces[-1].end_tile if self.pieces else 0

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
    num_rows: int, num_columns: int, *, piece_rows: int, tile_rows: int = 128, tile_columns: int = 256, swath: int = 8
) -> TilePlan:
    """Cuts a product, which may have no rows.

    Pieces of at most ``piece_rows`` (or one row of tiles) are cut between rows of tiles, as evenly as that allows, so that at most
    the last tile of a column is not full.
    """
    numbers = {"tile_rows": tile_rows, "tile_columns": tile_columns, "swath": swath, "num_columns": num_columns}
    small = [f"{name} is {value}" for name, value in {**numbers, "piece_rows": piece_rows}.items() if value < 1]
    if small:
        raise ValueError(f"{', '.join(small)}\nhint: each is at least 1")
    across, height = -(-num_columns // tile_columns), -(-num_rows // tile_rows)
    num_pieces = -(-height // max(piece_rows // tile_rows, 1))
    bounds = [height * number // num_pieces for number in range(num_pieces + 1)] if num_pieces else [0]
    pieces = tuple(
        Piece(number, low * tile_rows, min(high * tile_rows, num_rows), low * across, high * across)
        for number, (low, high) in enumerate(pairwise(bounds))
    )
    return TilePlan(num_rows, num_columns, tile_rows, tile_columns, swath, pieces)
