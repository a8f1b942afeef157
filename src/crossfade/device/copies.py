"""Copies cut for the copy engines: aligned, staggered over several targets.

Pure arithmetic first (`cut`, `stagger`), then `enqueue`, which is one line. The copy engine wants few, large copies whose inner
bytes begin on a 16-byte boundary: an odd head and tail go by themselves, so that the bulk is aligned. Copies to several targets
from several streams do not add up, so one stream serves them all, and every rank begins with its next neighbour: no two ranks send
to the same target at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from crossfade.device.driver import Driver

EDGE_BYTES = 16

_WORTH_AN_EDGE_BYTES = 64 << 10  # below this a separate head costs more than it saves


class Piece(NamedTuple):
    """One copy."""

    target: int
    source: int
    size_bytes: int


def cut(target: int, source: int, size_bytes: int) -> list[Piece]:
    """Cuts a copy so that the bulk of a long one begins and ends on a 16-byte boundary of the target."""
    head = -target % EDGE_BYTES
    if not (head and size_bytes >= _WORTH_AN_EDGE_BYTES and (source + head) % EDGE_BYTES == 0):
        return [Piece(target, source, size_bytes)] if size_bytes else []
    tail = (size_bytes - head) % EDGE_BYTES
    end = size_bytes - tail
    pieces = [Piece(target, source, head), Piece(target + head, source + head, end - head)]
    return [*pieces, Piece(target + end, source + end, tail)] if tail else pieces


def stagger(rank: int, num_ranks: int) -> list[int]:
    """The other ranks in the order in which ``rank`` serves them, from its next neighbour on: in step k all differ."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def enqueue(driver: Driver, pieces: Iterable[Piece], stream: int) -> None:
    """Enqueues all pieces on one stream."""
    copy = driver.copy
    for target, source, size_bytes in pieces:
        copy(target, source, size_bytes, stream)
