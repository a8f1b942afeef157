"""A product in steps, and the exchange of its parts: what is enqueued around the products, on addresses.

W ranks; r is this one. The product is done in *steps*: the other ranks' rows of a round, sent as they are done, or the own
rows of a round, to which the other ranks' parts are added. An own step may come later than right behind its round, so that parts
travel while something is computed (a *lag* in rounds; here 1)::

    stream   others 0       | others 1       | own 0, wait step 1 of all, add | others 2 | own 1, wait step 2, add | ...
    local      copy each to its rank's slot, set step 1 | copy each, set step 2 | set step 1 of the sums, wait for all, fetch

One stream has all copies: those of several streams take longer together than one after the other (measured).

All rounds of a call are one exchange: a rank's parts lie in one slot, and its signal ``full`` says round by round how far they have
come (steps of a signal: device/signals.py). An all-reduce has a second exchange for the sums, round by round too. Where a rank's
rows are longer than a slot, a call is several of these, one behind the other, with a round each.

Why the buffers are free (PR-1). A reduce-scatter takes one exchange, and a rank that begins one has waited in the one before for
all ranks. On a replayable lane, whose calls repeat their buffers, a call of one exchange begins with an empty one on the local
stream: it says that all ranks have begun this call, so they have read what the last one brought. The second exchange of an
all-reduce says the same to the next call: a rank's sums are announced behind all its own steps, and the next parts go behind their
fetches, which are on the local stream too. What is fetched, or put into the output by others, lands where the part for that rank
was: it has been sent, or that rank would have no sum.

Why no order of enqueuing stops (PR-2): a rank enqueues its parts of a round before it waits for those of others, and its sums of a
round before it waits for those of others; what it waits for needs nothing that it enqueues later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from crossfade.peers.exchange import barrier
from crossfade.peers.lane import Epoch, Lane


class Send(NamedTuple):
    """What goes to one rank."""

    rank: int
    source: int  # where it lies here
    offset: int  # where it goes in this rank's slot there
    size_bytes: int  # its length
    launch: Callable[[], None]  # enqueues its product on the caller's stream


class Step(NamedTuple):
    """The others' rows of a round, or the own ones. ``add`` is given the first exchange, whose buffers have the other ranks' parts,
    and the second one, if there is one, whose buffer of this rank gets the sums.
    """

    round: int
    sends: Sequence[Send] | None  # what goes to others, in the order in which it is done; None for the own rows
    launch: Callable[[], None] | None = (
        None  # of the own rows: enqueues, on the caller's stream, what needs no other rank
    )
    add: Callable[[Epoch, Epoch | None], None] | None = None  # enqueues there what needs the other ranks' parts


class Run(NamedTuple):
    """The rows of one rank in one round."""

    address: int  # where their sums go here
    offset: int  # of the first from the first row of that rank's block, in bytes
    size_bytes: int  # their length; all ranks know all


def reduce_scatter(
    lane: Lane,
    stream: int,
    local: int,
    steps: Sequence[Step],
    num_rounds: int,
    fill: Callable[[], None] | None = None,
    *,
    is_only: bool = True,
) -> None:
    """Parts go to their ranks, and the own steps add what has arrived. A block is at most ``lane.slot_bytes`` long.

    ``steps`` are in the order in which they are done, the others' of a round before the own one of that round. ``fill`` enqueues
    other work on the stream, where it would wait for the last parts. ``is_only``: the call has no other exchange.
    """
    if lane.is_replayable and is_only:
        barrier(lane, local)
    parts = lane.advance()
    for step in steps:
        _do(lane, stream, step, num_rounds, parts, None, fill if step is steps[-1] else None)


def all_reduce(
    lane: Lane, stream: int, steps: Sequence[Step], runs: Sequence[Mapping[int, Run]], offset: int | None
) -> None:
    """Like `reduce_scatter`; then all ranks get all sums, behind this on the local stream. ``runs`` are all ranks' rows, round by
    round.

    ``offset`` is that of this rank's block in every rank's memory, where that is the output itself: it is free there, since a rank
    has begun this call before its parts come. If it is None, own steps put their sums into this rank's buffer of the second
    exchange too.
    """
    parts, sums = lane.advance(), lane.advance()
    memory, num_rounds = lane.memory, len(runs)
    for step in steps:
        _do(lane, stream, step, num_rounds, parts, sums)
        if step.sends is not None:
            continue
        local, rows, number = lane.fork_local(stream), runs[step.round], step.round + 1
        if offset is not None:
            address, begin, size_bytes = rows[memory.rank]
            for p in lane.order:
                lane.copy(local, memory.buffers[p] + offset + begin, address, size_bytes)
            continue
        lane.announce(sums, lane.order, local, number)
        lane.await_step(sums, lane.order, local, number, num_rounds)
        for p in lane.arrivals:
            address, begin, size_bytes = rows[p]
            lane.copy(local, address, sums.buffers[p] + begin, size_bytes)
    if offset is not None:
        local = lane.fork_local(stream)
        lane.announce(sums, lane.order, local)
        lane.await_full(sums, lane.order, local)


def _do(
    lane: Lane,
    stream: int,
    step: Step,
    num_rounds: int,
    parts: Epoch,
    sums: Epoch | None,
    fill: Callable[[], None] | None = None,
) -> None:
    memory = lane.memory
    if step.launch is not None:
        step.launch()
    if fill is not None:
        fill()
    if step.sends is None:
        lane.await_step(parts, lane.order, stream, step.round + 1, num_rounds)
        if step.add is not None:
            step.add(parts, sums)
        return
    for send in step.sends:
        send.launch()
        local = lane.fork_local(stream)
        slot = parts.buffers[send.rank] + memory.rank * lane.slot_bytes
        lane.copy(local, slot + send.offset, send.source, send.size_bytes)
        lane.announce(parts, [send.rank], local, step.round + 1)
