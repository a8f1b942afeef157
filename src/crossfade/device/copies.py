"""Copies cut for the copy engines: chunked, aligned, staggered over several targets.

Pure arithmetic first (`cut`, `stagger`), then `enqueue`, which is one line. The copy engine wants few, large copies whose inner
bytes begin on a 16-byte boundary: an odd head and tail go by themselves, so that the bulk is aligned. Copies to several targets
from several streams do not add up, so one stream serves them all, a chunk to each in turn, and every rank begins with its next
neighbour: no two ranks send to the same target at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from crossfade.device.driver import Driver

EDGE_BYTES = 16

_WORTH_AN_EDGE_BYTES = 64 << 10  # below this a separate head costs more than it saves


class Piece(NamedTuple):
    """One copy."""

    target: int
    source: int
    size_bytes: int


def cut(target: int, source: int, size_bytes: int, chunk_bytes: int | None = None) -> list[Piece]:
    """Cuts a copy so that every piece but the edges begins on a 16-byte boundary of the target, and is at most a chunk long (a
    multiple of 16 bytes; None for no limit).
    """
    if chunk_bytes is not None and (chunk_bytes <= 0 or chunk_bytes % EDGE_BYTES):
        raise ValueError(f"a chunk of {chunk_bytes} bytes\nhint: take a positive multiple of {EDGE_BYTES}")
    pieces: list[Piece] = []
    at = 0
    head = -target % EDGE_BYTES
    if head and size_bytes >= _WORTH_AN_EDGE_BYTES and (source + head) % EDGE_BYTES == 0:
        pieces.append(Piece(target, source, head))
        at = head
    tail = (size_bytes - at) % EDGE_BYTES if pieces else 0
    end = size_bytes - tail
    while at < end:
        length = end - at if chunk_bytes is None else min(chunk_bytes, end - at)
        pieces.append(Piece(target + at, source + at, length))
        at += length
    if tail:
        pieces.append(Piece(target + end, source + end, tail))
    return pieces


def stagger(rank: int, num_ranks: int) -> list[int]:
    """The other ranks in the order in which ``rank`` serves them, from its next neighbour on: in step k all differ."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def in_turn(rows: Sequence[Sequence[Piece]]) -> Iterator[Piece]:
    """One piece of each row, then the next of each, until all rows are done."""
    for step in range(max(map(len, rows), default=0)):
        for row in rows:
            if step < len(row):
                yield row[step]


def enqueue(driver: Driver, pieces: Iterable[Piece], stream: int) -> None:
    """Enqueues all pieces on one stream."""
    copy = driver.copy
    for target, source, size_bytes in pieces:
        copy(target, source, size_bytes, stream)
