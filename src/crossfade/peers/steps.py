"""The collectives, as exchanges and kernels on addresses: those that move, one by one, and sums, several at a time.

W ranks; r is this one, p another one. A tensor that is longer than the lane's buffer is done piece by piece. Nothing is enqueued
for a length of 0. Callers see to it that all ranks give the same lengths.

Sums are done on a lane of their own each, or on several, each of which takes a piece. A *piece* is as much as a lane's buffer
takes, or less where lanes cut (`Lane.piece_bytes`). A row of pieces, one for each lane, goes like this, with all copies on the
caller's stream and each addition on its lane's local one::

    caller's     send piece 0, wait for it | send piece 1, wait for it | ... | pass sum 0 on | pass sum 1 on | ...
    local 0                                  add up piece 0
    local 1                                                              add up piece 1

So additions that wait for SMs hold up a row once, and not each piece. Each wait keeps the ranks in step: no two of them send to one
rank at the same time, nor do they fetch where others send, which would halve the speed of both. What is waited for was enqueued
before, on every rank, as in a single exchange.

A sum is passed on by the rank that has it where it can write the others' targets, else they fetch it out of its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from crossfade.peers.exchange import Block, Fetch, barrier, fetch, offer, push
from crossfade.peers.lane import Epoch, Lane
from crossfade.peers.memory import Kind, Reduction

NUM_MOVED = 4
"""Pieces of what others fetch, on lanes where tensors are cut: all but the first are put into the buffer beside a fetch."""


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


def all_gather(lane: Lane, stream: int, target: int, source: int, size_bytes: int, offset: int | None = None) -> None:
    """Rank p's ``size_bytes`` at ``source`` go to ``target + p * size_bytes`` of all ranks.

    With an ``offset``, at which the target lies in every rank's memory, each rank puts its part there with nothing between.
    """
    memory = lane.memory
    own = memory.rank * size_bytes
    if offset is not None:
        blocks = {p: Block(source, size_bytes, offset + own) for p in memory.peers}
        _put(lane, stream, blocks, (target + own, source, size_bytes))
        return

    def stage(on: int, begin: int, length: int) -> None:
        memory.kernels.copy(on, lane.next_buffer(), source + begin, length)

    def fetches(begin: int, length: int) -> dict[int, Fetch]:
        return {p: Fetch(0, target + p * size_bytes + begin, length) for p in memory.peers}

    pieces = _moved(lane, size_bytes, lane.buffer_bytes)
    _pull(lane, stream, pieces, stage, fetches, (target + own, source))


def _moved(lane: Lane, size_bytes: int, most_bytes: int) -> list[tuple[int, int]]:
    """The pieces of what others fetch."""
    return list(pieces_of(size_bytes, lane.piece_bytes(size_bytes, NUM_MOVED, most_bytes)))


def _pull(
    lane: Lane,
    stream: int,
    pieces: Sequence[tuple[int, int]],
    stage: Callable[[int, int, int], None] | None,
    fetches: Callable[[int, int], dict[int, Fetch]],
    own: tuple[int, int] | None = None,
) -> None:
    """Pieces that others fetch out of this rank's buffer.

    While a piece is fetched the next one is put into the buffer after it, and this rank's own block (``own``: target and source)
    goes to its place, piece by piece: kernels that do so may have to wait for SMs.
    """
    copy = lane.memory.kernels.copy
    if own is not None and own[0] == own[1]:
        own = None
    if stage is not None and pieces:
        stage(stream, *pieces[0])
    for number, (begin, length) in enumerate(pieces):
        epoch, later = offer(lane, stream), pieces[number + 1 : number + 2] if stage is not None else []
        is_begun = bool(later) or own is not None

        def beside(begin: int = begin, length: int = length, later: Sequence[tuple[int, int]] = later) -> None:
            local = lane.fork_local(stream)
            for each in later:
                assert stage is not None, "there is nothing later without it"
                stage(local, *each)
            if own is not None:
                copy(local, own[0] + begin, own[1] + begin, length)

        fetch(lane, epoch, stream, fetches(begin, length), beside if is_begun else None)
        if is_begun:
            lane.join_local(stream)


def _put(lane: Lane, stream: int, blocks: dict[int, Block], own: tuple[int, int, int]) -> None:
    """Puts blocks where other ranks want them in the end, when all ranks say that they may; and this rank's own."""
    if not own[2]:
        return
    is_begun = _begin_own(lane, stream, *own)
    barrier(lane, stream)
    push(lane, stream, blocks)
    if is_begun:
        lane.join_local(stream)


def all_to_all(lane: Lane, stream: int, target: int, source: int, block_bytes: int, offset: int | None = None) -> None:
    """Block p of rank r's source becomes block r of rank p's target; W blocks of ``block_bytes`` each. Not in place.

    With an ``offset``, at which the target lies in every rank's memory, each rank puts its blocks there with nothing between.
    """
    memory = lane.memory
    own = memory.rank * block_bytes
    if offset is not None:
        blocks = {p: Block(source + p * block_bytes, block_bytes, offset + own) for p in memory.peers}
        _put(lane, stream, blocks, (target + own, source + own, block_bytes))
        return
    slot = memory.rank * lane.slot_bytes

    def stage(on: int, begin: int, length: int) -> None:
        buffer = lane.next_buffer()
        for p in memory.peers:
            memory.kernels.copy(on, buffer + p * lane.slot_bytes, source + p * block_bytes + begin, length)

    def fetches(begin: int, length: int) -> dict[int, Fetch]:
        return {p: Fetch(slot, target + p * block_bytes + begin, length) for p in memory.peers}

    pieces = _moved(lane, block_bytes, lane.slot_bytes)
    _pull(lane, stream, pieces, stage, fetches, (target + own, source + own))


def broadcast(lane: Lane, stream: int, root: int, target: int, source: int, size_bytes: int) -> None:
    """The root's ``size_bytes`` at ``source`` go to the target of all ranks, who fetch them out of the root's buffer."""
    memory = lane.memory

    def stage(on: int, begin: int, length: int) -> None:
        memory.kernels.copy(on, lane.next_buffer(), source + begin, length)

    def fetches(begin: int, length: int) -> dict[int, Fetch]:
        return {p: Fetch(0, target + begin, length if p == root else 0) for p in memory.peers}

    pieces = _moved(lane, size_bytes, lane.buffer_bytes)
    if memory.rank == root:
        _pull(lane, stream, pieces, stage, fetches, (target, source))
    else:
        _pull(lane, stream, pieces, None, fetches)


ONE_SHOT_BYTES = 256 << 10
"""Up to here an all-reduce sends the whole tensor to all and takes one exchange, not two."""
_BLOCK_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Job:
    """A tensor to sum."""

    target: int  # where the result goes
    source: int  # this rank's tensor; for an all-reduce it may be the target
    count: int  # elements of the result
    kind: Kind  # of the elements
    offset: int | None = None  # all-reduce: where the target lies in every rank's memory, if it does


@dataclass(frozen=True, slots=True)
class _Piece:
    """What goes over one lane."""

    blocks: dict[int, Block]  # for each other rank, what it adds
    own: int  # this rank's share of its own tensor
    target: int  # where this rank's sum goes
    count: int  # elements of it
    kind: Kind  # of the elements
    fetches: dict[int, Fetch] | None = None  # the other ranks' sums, if this rank is to get them
    sums: dict[int, Block] | None = None  # what goes to each other rank, if this rank is to give it


def reduce_scatter(lanes: Sequence[Lane], stream: int, jobs: Sequence[Job]) -> None:
    """The sum over all ranks of block r of a job's sources goes to rank r's target; a source has W blocks of ``count`` elements."""
    memory = lanes[0].memory
    pieces = []
    for job in jobs:
        block_bytes = job.count * job.kind.size_bytes
        for begin, length in pieces_of(job.count, _share(lanes, jobs, job, lanes[0].slot_bytes)):
            at, size_bytes = begin * job.kind.size_bytes, length * job.kind.size_bytes
            blocks = {p: Block(job.source + p * block_bytes + at, size_bytes) for p in memory.peers}
            own = job.source + memory.rank * block_bytes + at
            pieces.append(_Piece(blocks, own, job.target + at, length, job.kind))
    _run(lanes, stream, pieces)


def all_reduce(lanes: Sequence[Lane], stream: int, jobs: Sequence[Job]) -> None:
    """The sum of all ranks' sources goes to all ranks' targets."""
    lane, pieces = lanes[0], []
    for job in jobs:
        size_bytes = job.count * job.kind.size_bytes
        if size_bytes <= min(ONE_SHOT_BYTES, lane.slot_bytes):
            blocks = {p: Block(job.source, size_bytes) for p in lane.memory.peers}
            if job.count:
                pieces.append(_Piece(blocks, job.source, job.target, job.count, job.kind))
            continue
        for begin, length in pieces_of(job.count, _share(lanes, jobs, job, lane.memory.num_ranks * lane.slot_bytes)):
            pieces.append(_two_shots(lane, job, begin, length))
    _run(lanes, stream, pieces)


def _share(lanes: Sequence[Lane], jobs: Sequence[Job], job: Job, most_bytes: int) -> int:
    """Elements of a piece of a job. Where tensors are cut, each gets the lanes that are left to it."""
    num_pieces = max(len(lanes) // len(jobs), 1)
    return lanes[0].piece_bytes(job.count * job.kind.size_bytes, num_pieces, most_bytes) // job.kind.size_bytes


def _two_shots(lane: Lane, job: Job, begin: int, length: int) -> _Piece:
    """Each rank sums one block, and gets those of the others."""
    memory, item_bytes = lane.memory, job.kind.size_bytes
    unit = max(_BLOCK_ALIGNMENT // item_bytes, 1)
    block = -(-length // (memory.num_ranks * unit)) * unit
    at = [(begin + min(p * block, length)) * item_bytes for p in range(memory.num_ranks + 1)]
    size_bytes = [at[p + 1] - at[p] for p in range(memory.num_ranks)]
    blocks = {p: Block(job.source + at[p], size_bytes[p]) for p in memory.peers}
    own, own_bytes = at[memory.rank], size_bytes[memory.rank]
    piece = (blocks, job.source + own, job.target + own, own_bytes // item_bytes, job.kind)
    if job.offset is not None:
        return _Piece(*piece, sums={p: Block(job.target + own, own_bytes, job.offset + own) for p in memory.peers})
    return _Piece(*piece, fetches={p: Fetch(0, job.target + at[p], size_bytes[p]) for p in memory.peers})


def _run(lanes: Sequence[Lane], stream: int, pieces: Sequence[_Piece]) -> None:
    for first in range(0, len(pieces), len(lanes)):
        row = list(zip(lanes, pieces[first:], strict=False))
        offers = []
        for lane, piece in row:
            epoch = push(lane, stream, piece.blocks)
            local = lane.fork_local(stream) if len(row) > 1 else stream
            offers.append(_add(lane, local, piece, epoch))
        for (lane, piece), offered in zip(row, offers, strict=True):
            if piece.fetches is not None and offered is not None:
                fetch(lane, offered, stream, piece.fetches)
            if len(row) > 1:
                lane.join_local(stream)
            if piece.sums is not None:
                push(lane, stream, piece.sums)


def _add(lane: Lane, stream: int, piece: _Piece, epoch: Epoch) -> Epoch | None:
    """Adds up what has come, and offers the sum if others fetch it."""
    memory = lane.memory
    targets: tuple[int, ...] = (piece.target,)
    if piece.fetches is not None:
        targets = (piece.target, lane.next_buffer())
    if piece.count:
        slots = (epoch.buffers[memory.rank], lane.slot_bytes, memory.rank, memory.num_ranks)
        memory.kernels.reduce(stream, Reduction(piece.kind, piece.count, targets, piece.own, *slots))
    return offer(lane, stream) if piece.fetches is not None else None
