"""A product in turns, and the exchange of its parts: what is enqueued around the kernels of tiles.py, on addresses.

W ranks; r is this one. The product is done in *turns*, each one launch: the other ranks' rows of a round, whose pieces are counted
as they are done, or the own rows, to which the other ranks' parts are added. A round's own turn comes a turn later than it could,
so that parts travel while something is computed (``lag`` in tiles.py)::

    stream   others 0       | others 1       | wait step 1 of all, own 0 | others 2 | wait step 2 of all, own 1 | ...
    local      wait piece, copy to its rank's slot, ..., set step 1      | wait piece, copy, ..., set step 2    | ...

All rounds of a call are one exchange: a rank's parts lie in one slot, and its signal ``full`` says round by round how far they have
come (steps of a signal: device/signals.py). An all-reduce has a second exchange for the sums, round by round too, on the local
stream.

Why the buffers are free (PR-1). A reduce-scatter takes one exchange, and whoever begins one has waited in the one before for all
ranks. On a replayable lane, whose calls repeat their buffers, an empty exchange on the local stream comes first: it says that all
ranks have begun this call, so they have read what the last one brought. The second exchange of an all-reduce says the same to the
next call: a rank's sums are announced behind all its own turns.

Why no order of enqueuing stops (PR-2): a rank enqueues its parts of a round before it waits for those of others, and its sums of a
round before it waits for those of others; what it waits for needs nothing that it enqueues later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from crossfade.device.copies import stagger
from crossfade.ops.overlaps import arrivals, copy
from crossfade.peers.exchange import barrier
from crossfade.peers.lane import Epoch, Lane

__all__ = ["Run", "Send", "Turn", "all_reduce", "reduce_scatter"]


class Send(NamedTuple):
    """A piece that goes to its rank.

    Attributes:
        rank: whose.
        source: where it lies here.
        offset: where it goes in this rank's slot there.
        size_bytes: its length.
        wait: enqueues, on the stream that it is given: the piece is done.
    """

    rank: int
    source: int
    offset: int
    size_bytes: int
    wait: Callable[[int], None]


class Turn(NamedTuple):
    """One launch.

    Attributes:
        round: which round's rows it does.
        sends: what it gives to others, in the order in which it is done; None for the own rows.
        launch: enqueues it on the caller's stream; the own rows' parts have arrived there.
    """

    round: int
    sends: Sequence[Send] | None
    launch: Callable[[Epoch, Epoch | None], None]


class Run(NamedTuple):
    """The rows of one rank in one round.

    Attributes:
        address: where their sums go here.
        offset: of the first from the first row of that rank's block, in bytes.
        size_bytes: their length; all ranks know all.
    """

    address: int
    offset: int
    size_bytes: int


def reduce_scatter(lane: Lane, stream: int, local: int, turns: Sequence[Turn], num_rounds: int) -> None:
    """Parts go to their ranks, and the own turns add what has arrived.

    Args:
        lane: where; a block is at most ``lane.slot_bytes`` long.
        stream: the caller's.
        local: the lane's own.
        turns: all, in the order in which they are done; the others' of a round before the own of that round.
        num_rounds: of them.
    """
    if lane.is_replayable:
        barrier(lane, local)
    parts = lane.advance()
    for turn in turns:
        _do(lane, stream, local, turn, num_rounds, parts, None)


def all_reduce(
    lane: Lane,
    stream: int,
    local: int,
    turns: Sequence[Turn],
    runs: Sequence[Mapping[int, Run]],
    offset: int | None,
) -> None:
    """The same, and all ranks get all sums, behind this on the local stream.

    Args:
        lane: where; a block is at most ``lane.slot_bytes`` long.
        stream: the caller's.
        local: the lane's own.
        turns: all. An own one puts its sums into this rank's buffer of the second exchange too, unless there is an ``offset``.
        runs: for each round, all ranks' rows.
        offset: of this rank's block in every rank's memory, where that is the output itself; else None. It is free there: a rank
            has begun this call before its parts come.
    """
    parts, sums = lane.advance(), lane.advance()
    home, num_rounds = lane.home, len(runs)
    order = stagger(home.rank, home.num_ranks)
    for turn in turns:
        _do(lane, stream, local, turn, num_rounds, parts, sums)
        if turn.sends is not None:
            continue
        lane.fork_local(stream)
        rows = runs[turn.round]
        if offset is not None:
            address, begin, size_bytes = rows[home.rank]
            for p in order:
                copy(lane, local, home.buffers[p] + offset + begin, address, size_bytes)
            continue
        for p in order:
            lane.announce_step(sums, p, local, turn.round + 1)
        for p in arrivals(home.rank, home.num_ranks):
            lane.await_step(sums, [p], local, turn.round + 1, num_rounds)
            address, begin, size_bytes = rows[p]
            copy(lane, local, address, sums.buffers[p] + begin, size_bytes)
    if offset is not None:
        lane.announce(sums, order, local, is_batched=True)
        lane.await_full(sums, order, local, is_batched=True)


def _do(lane: Lane, stream: int, local: int, turn: Turn, num_rounds: int, parts: Epoch, sums: Epoch | None) -> None:
    home = lane.home
    order = stagger(home.rank, home.num_ranks)
    if turn.sends is None:
        lane.await_step(parts, order, stream, turn.round + 1, num_rounds)
        turn.launch(parts, sums)
        return
    turn.launch(parts, sums)
    for p in order:
        for send in (each for each in turn.sends if each.rank == p):
            send.wait(local)
            slot = parts.buffers[p] + home.rank * lane.slot_bytes
            copy(lane, local, slot + send.offset, send.source, send.size_bytes)
        lane.announce_step(parts, p, local, turn.round + 1)
