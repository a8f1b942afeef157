"""The collectives that move, as exchanges and kernels on addresses (those that sum: sums.py).

W ranks; r is this rank, p another one. A tensor that is longer than the lane's buffer is done piece by piece. Nothing is enqueued
for a length of 0. Callers see to it that all ranks give the same lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

from crossfade.peers.exchange import Block, Fetch, barrier, pull, push
from crossfade.peers.lane import Lane
from crossfade.peers.tuning import DEFAULT, Direction, Tuning

__all__ = ["all_gather", "all_to_all", "broadcast", "end", "pieces_of"]


def pieces_of(size: int, limit: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of each piece."""
    for begin in range(0, size, max(limit, 1)):
        yield begin, min(limit, size - begin)


def end(lane: Lane, stream: int) -> None:
    """Ends a collective: a replayable lane is left as it was found."""
    if lane.is_uneven:
        barrier(lane, stream)


def _begin_own(lane: Lane, stream: int, target: int, source: int, size_bytes: int) -> bool:
    """This rank's own block goes to its place, beside what follows on the stream; says whether that is to be waited for."""
    if target == source or not size_bytes:
        return False
    lane.memory.kernels.copy(lane.fork_local(stream), target, source, size_bytes)
    return True


def all_gather(
    lane: Lane,
    stream: int,
    target: int,
    source: int,
    size_bytes: int,
    tuning: Tuning = DEFAULT,
    offset: int | None = None,
) -> None:
    """Rank p's ``size_bytes`` at ``source`` go to ``target + p * size_bytes`` of all ranks.

    With an ``offset``, at which the target lies in every rank's memory, each rank puts its part there with nothing between.
    """
    memory = lane.memory
    copy = memory.kernels.copy
    own = memory.rank * size_bytes
    if offset is not None:
        blocks = {p: Block(source, size_bytes, offset + own) for p in memory.peers}
        _put(lane, stream, blocks, tuning, (target + own, source, size_bytes))
        return
    is_pull = tuning.direction is Direction.PULL
    is_begun = not is_pull and _begin_own(lane, stream, target + own, source, size_bytes)
    for begin, length in pieces_of(size_bytes, lane.buffer_bytes if is_pull else lane.slot_bytes):
        into = {p: target + p * size_bytes + begin for p in memory.peers}
        if is_pull:
            copy(stream, lane.next_buffer(), source + begin, length)
            is_begun = is_begun or _begin_own(lane, stream, target + own, source, size_bytes)
            pull(lane, stream, {p: Fetch(0, into[p], length) for p in memory.peers}, tuning)
        else:
            epoch = push(lane, stream, {p: Block(source + begin, length) for p in memory.peers}, tuning)
            for p in memory.peers:
                copy(stream, into[p], epoch.buffers[memory.rank] + p * lane.slot_bytes, length)
    if is_begun:
        lane.join_local(stream)


def _put(lane: Lane, stream: int, blocks: dict[int, Block], tuning: Tuning, own: tuple[int, int, int]) -> None:
    """Puts blocks where other ranks want them in the end, when all ranks say that they may; and this rank's own."""
    if not own[2]:
        return
    is_begun = _begin_own(lane, stream, *own)
    barrier(lane, stream)
    push(lane, stream, blocks, tuning)
    if is_begun:
        lane.join_local(stream)


def all_to_all(
    lane: Lane,
    stream: int,
    target: int,
    source: int,
    block_bytes: int,
    tuning: Tuning = DEFAULT,
    offset: int | None = None,
) -> None:
    """Block p of rank r's source becomes block r of rank p's target; W blocks of ``block_bytes`` each. Not in place.

    With an ``offset``, at which the target lies in every rank's memory, each rank puts its blocks there with nothing between.
    """
    memory = lane.memory
    copy = memory.kernels.copy
    own = memory.rank * block_bytes
    if offset is not None:
        blocks = {p: Block(source + p * block_bytes, block_bytes, offset + own) for p in memory.peers}
        _put(lane, stream, blocks, tuning, (target + own, source + own, block_bytes))
        return
    is_begun = _begin_own(lane, stream, target + own, source + own, block_bytes)
    for begin, length in pieces_of(block_bytes, lane.slot_bytes):
        at = {p: p * block_bytes + begin for p in memory.peers}
        if tuning.direction is Direction.PULL:
            buffer = lane.next_buffer()
            for p in memory.peers:
                copy(stream, buffer + p * lane.slot_bytes, source + at[p], length)
            slot = memory.rank * lane.slot_bytes
            pull(lane, stream, {p: Fetch(slot, target + at[p], length) for p in memory.peers}, tuning)
        else:
            epoch = push(lane, stream, {p: Block(source + at[p], length) for p in memory.peers}, tuning)
            for p in memory.peers:
                copy(stream, target + at[p], epoch.buffers[memory.rank] + p * lane.slot_bytes, length)
    if is_begun:
        lane.join_local(stream)


def broadcast(
    lane: Lane, stream: int, root: int, target: int, source: int, size_bytes: int, tuning: Tuning = DEFAULT
) -> None:
    """The root's ``size_bytes`` at ``source`` go to the target of all ranks, who fetch them out of the root's buffer."""
    memory = lane.memory
    is_begun = memory.rank == root and _begin_own(lane, stream, target, source, size_bytes)
    for begin, length in pieces_of(size_bytes, lane.buffer_bytes):
        if memory.rank == root:
            memory.kernels.copy(stream, lane.next_buffer(), source + begin, length)
        pull(lane, stream, {p: Fetch(0, target + begin, length if p == root else 0) for p in memory.peers}, tuning)
    if is_begun:
        lane.join_local(stream)
