"""One exchange: every rank gets a block of every other rank, by push or by pull.

::

    push, rank r     for p: copy to slot r of p's buffer | set full[r, p]  ...  wait full[p, r] for all p | use the slots
    pull, rank r     (block staged in r's buffer) set full[r, p] for all p | for p: wait full[p, r], copy from p's buffer

All signals are set before the first wait is enqueued, on every rank. So whatever a rank waits for is enqueued by its own host
alone, never behind a wait of the same exchange, even where all streams of a process share one hardware queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from crossfade.device.copies import cut, enqueue, in_turn
from crossfade.peers.lane import Epoch, Lane
from crossfade.peers.tuning import DEFAULT, Tuning


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


def _deal(order: list[int], streams: list[int]) -> list[tuple[int, list[int]]]:
    """The ranks in turn, spread over the streams."""
    return [(stream, order[k :: len(streams)]) for k, stream in enumerate(streams)]


def push(lane: Lane, stream: int, blocks: Mapping[int, Block], tuning: Tuning = DEFAULT) -> Epoch:
    """Copies a block to every other rank, and waits for theirs.

    Behind it on the stream, the block of rank p lies in slot p of this rank's own buffer, or where rank p put it.
    """
    memory = lane.memory
    epoch = lane.advance()
    order = tuning.order(memory.rank, memory.num_ranks)
    streams = lane.fork(stream, tuning.num_streams)
    for own, peers in _deal(order, streams):
        rows = {}
        for peer in peers:
            source, size_bytes, offset = blocks[peer]
            slot = epoch.buffers[peer] + memory.rank * lane.slot_bytes
            target = slot if offset is None else memory.buffers[peer] + offset
            rows[peer] = cut(target, source, size_bytes, tuning.chunk_bytes)
            lane.num_bytes += size_bytes
        if tuning.is_interleaved:
            enqueue(memory.driver, in_turn(list(rows.values())), own)
            lane.announce(epoch, peers, own, is_batched=tuning.is_batched)
            continue
        for peer in peers:
            enqueue(memory.driver, rows[peer], own)
            if not tuning.is_batched:
                lane.announce(epoch, [peer], own, is_batched=False)
        if tuning.is_batched:
            lane.announce(epoch, peers, own, is_batched=True)
    lane.join(streams)
    lane.await_full(epoch, order, stream, is_batched=tuning.is_batched)
    return epoch


def pull(lane: Lane, stream: int, fetches: Mapping[int, Fetch], tuning: Tuning = DEFAULT) -> Epoch:
    """`offer`, and `fetch`.

    What others fetch must have been put into ``lane.next_buffer()`` before, on the same stream.
    """
    epoch = offer(lane, stream, tuning)
    fetch(lane, epoch, stream, fetches, tuning)
    return epoch


def offer(lane: Lane, stream: int, tuning: Tuning = DEFAULT) -> Epoch:
    """Says to every other rank that this rank's next buffer is filled."""
    epoch = lane.advance()
    order = tuning.order(lane.memory.rank, lane.memory.num_ranks)
    lane.announce(epoch, order, stream, is_batched=tuning.is_batched)
    return epoch


def fetch(lane: Lane, epoch: Epoch, stream: int, fetches: Mapping[int, Fetch], tuning: Tuning = DEFAULT) -> None:
    """Copies from every other rank's buffer, when it is offered."""
    memory = lane.memory
    order = tuning.order(memory.rank, memory.num_ranks)
    if tuning.is_batched:
        lane.await_full(epoch, order, stream, is_batched=True)
    streams = lane.fork(stream, tuning.num_streams)
    for own, peers in _deal(order, streams):
        rows = {}
        for peer in peers:
            offset, target, size_bytes = fetches[peer]
            rows[peer] = cut(target, epoch.buffers[peer] + offset, size_bytes, tuning.chunk_bytes)
            lane.num_bytes += size_bytes
        if tuning.is_interleaved:
            if not tuning.is_batched:
                lane.await_full(epoch, peers, own, is_batched=False)
            enqueue(memory.driver, in_turn(list(rows.values())), own)
            continue
        for peer in peers:
            if not tuning.is_batched:
                lane.await_full(epoch, [peer], own, is_batched=False)
            enqueue(memory.driver, rows[peer], own)
    lane.join(streams)


def barrier(lane: Lane, stream: int) -> None:
    """An empty exchange: behind it on the stream, every rank has reached this point."""
    epoch = lane.advance()
    order = DEFAULT.order(lane.memory.rank, lane.memory.num_ranks)
    lane.announce(epoch, order, stream, is_batched=True)
    lane.await_full(epoch, order, stream, is_batched=True)
