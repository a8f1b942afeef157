"""Sums over ranks, as exchanges and kernels on addresses: several at a time, each on a lane of its own.

A *piece* is as much as a lane's buffer takes. A row of pieces, one for each lane, goes like this, with all copies on the caller's
stream and each addition on its lane's local one::

    caller's     send piece 0, wait for it | send piece 1, wait for it | ... | pass sum 0 on | pass sum 1 on | ...
    local 0                                  add up piece 0
    local 1                                                              add up piece 1

So additions that wait for SMs hold up a row once, and not each piece. Each wait keeps the ranks in step: no two of them send to one
rank at the same time, nor do they fetch where others send, which would halve the speed of both. What is waited for was enqueued
before, on every rank, as in a single exchange.

A sum is passed on by the rank that has it where it can write the others' targets, else they fetch it out of its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crossfade.peers.exchange import Block, Fetch, fetch, offer, push
from crossfade.peers.lane import Epoch, Lane
from crossfade.peers.memory import Kind, Reduction
from crossfade.peers.steps import pieces_of
from crossfade.peers.tuning import DEFAULT, Tuning

__all__ = ["Job", "all_reduce", "reduce_scatter"]

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


def reduce_scatter(lanes: Sequence[Lane], stream: int, jobs: Sequence[Job], tuning: Tuning = DEFAULT) -> None:
    """The sum over all ranks of block r of a job's sources goes to rank r's target; a source has W blocks of ``count`` elements."""
    memory = lanes[0].memory
    pieces = []
    for job in jobs:
        block_bytes = job.count * job.kind.size_bytes
        for begin, length in pieces_of(job.count, lanes[0].slot_bytes // job.kind.size_bytes):
            at, size_bytes = begin * job.kind.size_bytes, length * job.kind.size_bytes
            blocks = {p: Block(job.source + p * block_bytes + at, size_bytes) for p in memory.peers}
            own = job.source + memory.rank * block_bytes + at
            pieces.append(_Piece(blocks, own, job.target + at, length, job.kind))
    _run(lanes, stream, pieces, tuning)


def all_reduce(lanes: Sequence[Lane], stream: int, jobs: Sequence[Job], tuning: Tuning = DEFAULT) -> None:
    """The sum of all ranks' sources goes to all ranks' targets."""
    lane, pieces = lanes[0], []
    for job in jobs:
        size_bytes = job.count * job.kind.size_bytes
        if size_bytes <= min(tuning.one_shot_bytes, lane.slot_bytes):
            blocks = {p: Block(job.source, size_bytes) for p in lane.memory.peers}
            if job.count:
                pieces.append(_Piece(blocks, job.source, job.target, job.count, job.kind))
            continue
        for begin, length in pieces_of(job.count, lane.memory.num_ranks * (lane.slot_bytes // job.kind.size_bytes)):
            pieces.append(_two_shots(lane, job, begin, length))
    _run(lanes, stream, pieces, tuning)


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


def _run(lanes: Sequence[Lane], stream: int, pieces: Sequence[_Piece], tuning: Tuning) -> None:
    for first in range(0, len(pieces), len(lanes)):
        row = list(zip(lanes, pieces[first:], strict=False))
        offers = []
        for lane, piece in row:
            epoch = push(lane, stream, piece.blocks, tuning)
            local = lane.fork_local(stream) if len(row) > 1 else stream
            offers.append(_add(lane, local, piece, epoch, tuning))
        for (lane, piece), offered in zip(row, offers, strict=True):
            if piece.fetches is not None and offered is not None:
                fetch(lane, offered, stream, piece.fetches, tuning)
            if len(row) > 1:
                lane.join_local(stream)
            if piece.sums is not None:
                push(lane, stream, piece.sums, tuning)


def _add(lane: Lane, stream: int, piece: _Piece, epoch: Epoch, tuning: Tuning) -> Epoch | None:
    """Adds up what has come, and offers the sum if others fetch it."""
    memory = lane.memory
    targets: tuple[int, ...] = (piece.target,)
    if piece.fetches is not None:
        targets = (piece.target, lane.next_buffer())
    if piece.count:
        slots = (epoch.buffers[memory.rank], lane.slot_bytes, memory.rank, memory.num_ranks)
        memory.kernels.reduce(stream, Reduction(piece.kind, piece.count, targets, piece.own, *slots))
    return offer(lane, stream, tuning) if piece.fetches is not None else None
