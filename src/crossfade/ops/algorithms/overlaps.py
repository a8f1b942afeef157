"""Products between the parts of an exchange, on addresses: one round of each operator that moves rows (sums: schedule.py).

W ranks; r is this one. A *part* is this round's share of what goes to, or comes from, one rank. The caller gives functions that
enqueue products on ``stream``; everything else is enqueued here, on ``stream`` and on the lane's local stream. On every rank the
signals of an exchange are enqueued before its first wait (PR-2). In step k every rank serves another one (`Lane.order`).

All-gather: what arrives is read where it lies::

    local    copy own rows to r+1's slot r, set full | copy them to r+2's slot r, set full | ...
    stream   mm own rows | wait for full from r-1, mm its slot | wait for full from r-2, mm its slot | ...

Rows that are wanted in memory that all ranks can write are copied there, and read there; an empty exchange on the local
stream says first that the memory is free. So it does of slots that a graph uses again with each replay.

All-to-all: products are written where others fetch them, and land in the output at once::

    stream   mm rows for r+1 -> own buffer, set full | mm rows for r+2 -> own buffer, set full | ... | mm own rows -> out
    local    wait for full from r-1, fetch from its buffer | wait for full from r-2, fetch from its buffer | ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from crossfade.peers.exchange import barrier
from crossfade.peers.lane import Epoch, Lane


class Part(NamedTuple):
    """A share of one rank."""

    address: int  # where it lies here
    size_bytes: int  # its length


def _slot(lane: Lane, epoch: Epoch, owner: int, writer: int) -> int:
    """A rank's place in a rank's buffer."""
    return epoch.buffers[owner] + writer * lane.slot_bytes


class _Gather:
    """All rounds of an all-gather, or of an all-to-all in front of products.

    What arrives last in a round is used when the next round's copies are under way.
    """

    def __init__(self, lane: Lane, stream: int) -> None:
        self._lane = lane
        self._stream = stream
        self._last: Callable[[], None] | None = None

    def round(self, parts: Sequence[Part], use: Callable[[int, int], None]) -> None:
        """One round: ``parts`` are this rank's rows that each rank gets, at most ``lane.slot_bytes`` long; ``use`` enqueues the
        product of a rank's rows, which lie at this address.

        The copies may begin when all signals of the round before are here. This rank's own signals say that it has read all its
        slots, so they come behind the last product of that round (PR-1).
        """
        lane, stream = self._lane, self._stream
        memory = lane.memory
        epoch = lane.advance()
        order = lane.order
        local = lane.fork_local(stream)
        for p in order:
            lane.copy(local, _slot(lane, epoch, p, memory.rank), *parts[p])
            if self._last is None:
                lane.announce(epoch, [p], local)
        if self._last is not None:
            self._last()
            lane.announce(epoch, order, lane.fork_local(stream))
        use(memory.rank, parts[memory.rank].address)
        self._last = None
        for p in lane.arrivals:
            if self._last is not None:
                self._last()
            lane.await_full(epoch, [p], stream)
            self._last = partial(use, p, _slot(lane, epoch, memory.rank, p))

    def end(self) -> None:
        """The last product of the last round."""
        if self._last is not None:
            self._last()
            self._last = None


def all_gather(lane: Lane, stream: int, rounds: Sequence[tuple[Part, Callable[[int, int], None]]]) -> None:
    """Every rank uses all ranks' rows (see `_Gather.round`)."""
    num_ranks = lane.memory.num_ranks
    all_to_all_first(lane, stream, [([own] * num_ranks, use) for own, use in rounds])


def all_to_all_first(
    lane: Lane, stream: int, rounds: Sequence[tuple[Sequence[Part], Callable[[int, int], None]]]
) -> None:
    """Every rank uses what all ranks have for it (see `_Gather.round`); an all-gather is the case of equal parts.

    Where an empty exchange is due, since a replayable lane takes an even number of them, that of a single round comes first and on
    the local stream: there the product of the own rows hides it. In front of more rounds it could still wait there while the
    caller's stream waits for the second of them, whose signals are the same ones.
    """
    if lane.is_replayable and len(rounds) == 1:
        barrier(lane, lane.fork_local(stream))
    gather = _Gather(lane, stream)
    for parts, use in rounds:
        gather.round(parts, use)
    gather.end()


def all_gather_into(lane: Lane, stream: int, local: int, own: Part, offset: int, use: Callable[[int], None]) -> None:
    """Every rank uses all ranks' rows, in memory that all ranks can write, at ``offset`` in each; however long they are, in one
    round.

    ``local`` is the lane's own stream, behind the beginning of the call. ``use`` enqueues the product of a rank's rows: they are
    there, or, of this rank itself, anywhere.
    """
    memory = lane.memory
    barrier(lane, local)
    epoch = lane.advance()
    for p in lane.order:
        lane.copy(local, memory.buffers[p] + offset, *own)
        lane.announce(epoch, [p], local)
    use(memory.rank)
    for p in lane.arrivals:
        lane.await_full(epoch, [p], stream)
        use(p)


def all_to_all(
    lane: Lane,
    stream: int,
    local: int,
    compute: Callable[[int, int | None], None],
    received: Mapping[int, Part],
    *,
    is_first: bool,
) -> None:
    """One round: every rank's products go to all ranks; they are there behind this on the local stream.

    What goes to one rank is at most ``lane.slot_bytes`` long. ``compute`` enqueues the product of the rows for a rank, into this
    address; None for this rank itself, in its place. ``received`` says for each other rank where what it computed goes. A later
    round begins behind the fetches of the one before: then its buffer is free, and its signals say that this rank has left the
    others' (PR-1).
    """
    memory = lane.memory
    if not is_first:
        lane.join_local(stream)
    epoch = lane.advance()
    for p in lane.order:
        compute(p, _slot(lane, epoch, memory.rank, p))
        lane.announce(epoch, [p], stream)
    compute(memory.rank, None)
    for p in lane.arrivals:
        lane.await_full(epoch, [p], local)
        target, size_bytes = received[p]
        lane.copy(local, target, _slot(lane, epoch, p, memory.rank), size_bytes)
