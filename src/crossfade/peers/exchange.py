"""One exchange: every rank gets a block of every other rank, by push or by pull.

::

    push, rank r     for p: copy to slot r of p's buffer | set full[r, p]  ...  wait full[p, r] for all p | use the slots
    pull, rank r     (block staged in r's buffer) set full[r, p] for all p | for p: wait full[p, r], copy from p's buffer

All signals are set before the first wait is enqueued, on every rank. So whatever a rank waits for is enqueued by its own host
alone, never behind a wait of the same exchange, even where all streams of a process share one hardware queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from crossfade.peers.lane import Epoch, Lane


class Block(NamedTuple):
    """What goes to one rank."""

    source: int  # where it lies here
    size_bytes: int  # its length
    offset: int | None = None  # where it goes in that rank's memory, which is free; None: into this rank's slot


class Fetch(NamedTuple):
    """What comes from one rank."""

    offset: int  # where it begins in that rank's buffer
    target: int  # where it goes
    size_bytes: int  # its length


def push(lane: Lane, stream: int, blocks: Mapping[int, Block]) -> Epoch:
    """Copies a block to every other rank, and waits for theirs.

    Behind it on the stream, the block of rank p lies in slot p of this rank's own buffer, or where rank p put it.
    """
    memory, epoch, order = lane.memory, lane.advance(), lane.order
    for peer in order:
        source, size_bytes, offset = blocks[peer]
        slot = epoch.buffers[peer] + memory.rank * lane.slot_bytes
        lane.copy(stream, slot if offset is None else memory.buffers[peer] + offset, source, size_bytes)
    lane.announce(epoch, order, stream)
    lane.await_full(epoch, order, stream)
    return epoch


def offer(lane: Lane, stream: int) -> Epoch:
    """Says to every other rank that this rank's next buffer is filled: what they fetch was put there on the same stream."""
    epoch = lane.advance()
    lane.announce(epoch, lane.order, stream)
    return epoch


def fetch(
    lane: Lane, epoch: Epoch, stream: int, fetches: Mapping[int, Fetch], beside: Callable[[], None] | None = None
) -> None:
    """Copies from every other rank's buffer, when it is offered. ``beside`` enqueues what may then go on beside the copies."""
    lane.await_full(epoch, lane.order, stream)
    if beside is not None:
        beside()
    for peer in lane.order:
        offset, target, size_bytes = fetches[peer]
        lane.copy(stream, target, epoch.buffers[peer] + offset, size_bytes)


def barrier(lane: Lane, stream: int) -> None:
    """An empty exchange: behind it on the stream, every rank has reached this point."""
    epoch = offer(lane, stream)
    lane.await_full(epoch, lane.order, stream)
