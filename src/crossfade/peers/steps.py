"""The collectives, as exchanges and kernels on addresses.

W ranks; r is this rank, p another one. A tensor that is longer than the lane's buffer is done piece by piece. Nothing is enqueued
for a length of 0. Callers see to it that all ranks give the same lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from crossfade.peers.exchange import Block, Fetch, await_sent, barrier, fetch, offer, pull, push, send
from crossfade.peers.home import Kind, Reduction
from crossfade.peers.lane import Epoch, Lane
from crossfade.peers.tuning import DEFAULT, Direction, Local, Tuning

__all__ = ["all_gather", "all_reduce", "all_to_all", "end", "reduce_scatter"]

_BLOCK_ALIGNMENT = 16


def _pieces(size: int, limit: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of each piece."""
    for begin in range(0, size, max(limit, 1)):
        yield begin, min(limit, size - begin)


def end(lane: Lane, stream: int) -> None:
    """Ends a collective: a replayable lane is left as it was found."""
    while lane.is_uneven:
        barrier(lane, stream)


def _begin_own(lane: Lane, stream: int, target: int, source: int, size_bytes: int, tuning: Tuning) -> bool:
    """This rank's own block goes to its place, beside what follows on the stream; says whether that is to be waited for."""
    if target == source or not size_bytes:
        return False
    local = lane.fork_local(stream)
    if tuning.local is Local.ENGINE:
        lane.home.driver.copy(target, source, size_bytes, local)
    else:
        lane.home.kernels.copy(local, target, source, size_bytes)
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
    home = lane.home
    copy = home.kernels.copy
    own = home.rank * size_bytes
    if offset is not None:
        blocks = {p: Block(source, size_bytes, offset + own) for p in home.peers}
        _put(lane, stream, blocks, tuning, (target + own, source, size_bytes))
        return
    is_pull = tuning.direction is Direction.PULL
    is_begun = not is_pull and _begin_own(lane, stream, target + own, source, size_bytes, tuning)
    for begin, length in _pieces(size_bytes, lane.buffer_bytes if is_pull else lane.slot_bytes):
        into = {p: target + p * size_bytes + begin for p in home.peers}
        if is_pull:
            copy(stream, lane.next_buffer(), source + begin, length)
            is_begun = is_begun or _begin_own(lane, stream, target + own, source, size_bytes, tuning)
            pull(lane, stream, {p: Fetch(0, into[p], length) for p in home.peers}, tuning)
        else:
            epoch = push(lane, stream, {p: Block(source + begin, length) for p in home.peers}, tuning)
            for p in home.peers:
                copy(stream, into[p], epoch.buffers[home.rank] + p * lane.slot_bytes, length)
    if is_begun:
        lane.join_local(stream)


def _put(lane: Lane, stream: int, blocks: dict[int, Block], tuning: Tuning, own: tuple[int, int, int]) -> None:
    """Puts blocks where other ranks want them in the end, when all ranks say that they may; and this rank's own."""
    if not own[2]:
        return
    is_begun = _begin_own(lane, stream, *own, tuning)
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
    home = lane.home
    copy = home.kernels.copy
    own = home.rank * block_bytes
    if offset is not None:
        blocks = {p: Block(source + p * block_bytes, block_bytes, offset + own) for p in home.peers}
        _put(lane, stream, blocks, tuning, (target + own, source + own, block_bytes))
        return
    is_begun = _begin_own(lane, stream, target + own, source + own, block_bytes, tuning)
    for begin, length in _pieces(block_bytes, lane.slot_bytes):
        at = {p: p * block_bytes + begin for p in home.peers}
        if tuning.direction is Direction.PULL:
            buffer = lane.next_buffer()
            for p in home.peers:
                copy(stream, buffer + p * lane.slot_bytes, source + at[p], length)
            slot = home.rank * lane.slot_bytes
            pull(lane, stream, {p: Fetch(slot, target + at[p], length) for p in home.peers}, tuning)
        else:
            epoch = push(lane, stream, {p: Block(source + at[p], length) for p in home.peers}, tuning)
            for p in home.peers:
                copy(stream, target + at[p], epoch.buffers[home.rank] + p * lane.slot_bytes, length)
    if is_begun:
        lane.join_local(stream)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a sum.

    Attributes:
        blocks: what goes to each other rank.
        own: this rank's share of its own input.
        target: where the sum goes.
        count: elements of this rank's share.
    """

    blocks: dict[int, Block]
    own: int
    target: int
    count: int


def _cut_parts(count: int, limit: int, align_to: int, kind: Kind, tuning: Tuning) -> list[list[tuple[int, int]]]:
    """(begin, length) in elements of each part; those of one list are on the way at the same time.

    Args:
        count: elements.
        limit: the most elements in a part.
        align_to: parts but the last are multiples of so many elements.
        kind: of the elements.
        tuning: how many, and how short.
    """
    most = max(min(tuning.num_parts, count * kind.size_bytes // tuning.part_bytes), 1)
    rows = []
    for begin, length in _pieces(count, limit * tuning.num_parts):
        step = min(-(-length // (most * align_to)) * align_to, limit)
        rows.append([(begin + first, part) for first, part in _pieces(length, step)])
    return rows


def _sum_parts(
    lane: Lane, stream: int, parts: list[_Part], kind: Kind, tuning: Tuning, *, is_shared: bool
) -> list[Epoch]:
    """Sends all parts, then adds up each as it has come from all ranks; beside the stream if there are several.

    With ``is_shared`` each sum also lands in an exchange's buffer, and is offered to the other ranks; these exchanges are returned.
    """
    home = lane.home
    sent = [send(lane, stream, part.blocks, tuning) for part in parts]
    local = lane.fork_local(stream) if len(parts) > 1 else stream
    results = []
    for epoch, part in zip(sent, parts, strict=True):
        await_sent(lane, epoch, local, tuning)
        targets: tuple[int, ...] = (part.target,)
        if is_shared:
            results.append(lane.advance())
            targets = (part.target, results[-1].buffers[home.rank])
        if part.count:
            slots = epoch.buffers[home.rank]
            home.kernels.reduce(
                local,
                Reduction(kind, part.count, targets, part.own, slots, lane.slot_bytes, home.rank, home.num_ranks),
            )
        if is_shared:
            offer(lane, results[-1], local, tuning)
    return results


def reduce_scatter(
    lane: Lane, stream: int, target: int, source: int, count: int, kind: Kind, tuning: Tuning = DEFAULT
) -> None:
    """The sum over all ranks of block r of their sources goes to rank r's target; W blocks of ``count`` elements each."""
    home = lane.home
    block_bytes = count * kind.size_bytes
    align_to = max(_BLOCK_ALIGNMENT // kind.size_bytes, 1)
    for row in _cut_parts(count, lane.slot_bytes // kind.size_bytes, align_to, kind, tuning):
        parts = []
        for begin, length in row:
            at, size_bytes = begin * kind.size_bytes, length * kind.size_bytes
            blocks = {p: Block(source + p * block_bytes + at, size_bytes) for p in home.peers}
            parts.append(_Part(blocks, source + home.rank * block_bytes + at, target + at, length))
        _sum_parts(lane, stream, parts, kind, tuning, is_shared=False)
        if len(parts) > 1:
            lane.join_local(stream)


def all_reduce(
    lane: Lane, stream: int, target: int, source: int, count: int, kind: Kind, tuning: Tuning = DEFAULT
) -> None:
    """The sum of all ranks' sources goes to all ranks' targets, which may be the sources."""
    home = lane.home
    size_bytes = count * kind.size_bytes
    if size_bytes <= min(tuning.one_shot_bytes, lane.slot_bytes):
        if count:
            part = _Part({p: Block(source, size_bytes) for p in home.peers}, source, target, count)
            _sum_parts(lane, stream, [part], kind, tuning, is_shared=False)
        return
    unit = max(_BLOCK_ALIGNMENT // kind.size_bytes, 1) * home.num_ranks
    for row in _cut_parts(count, home.num_ranks * (lane.slot_bytes // kind.size_bytes), unit, kind, tuning):
        _two_shots(lane, stream, target, source, row, kind, tuning)


def _two_shots(
    lane: Lane, stream: int, target: int, source: int, row: list[tuple[int, int]], kind: Kind, tuning: Tuning
) -> None:
    """A reduce-scatter of each part, whose result also lands in a buffer, and an all-gather by pull from there."""
    home = lane.home
    unit = max(_BLOCK_ALIGNMENT // kind.size_bytes, 1)
    parts, shards = [], []
    for begin, length in row:
        block = -(-length // (home.num_ranks * unit)) * unit
        at = [(begin + min(p * block, length)) * kind.size_bytes for p in range(home.num_ranks + 1)]
        blocks = {p: Block(source + at[p], at[p + 1] - at[p]) for p in home.peers}
        own = at[home.rank]
        parts.append(_Part(blocks, source + own, target + own, (at[home.rank + 1] - own) // kind.size_bytes))
        shards.append(at)
    results = _sum_parts(lane, stream, parts, kind, tuning, is_shared=True)
    for epoch, at in zip(results, shards, strict=True):
        fetch(lane, epoch, stream, {p: Fetch(0, target + at[p], at[p + 1] - at[p]) for p in home.peers}, tuning)
    if len(parts) > 1:
        lane.join_local(stream)
