"""Sums whose parts stay where they were computed, and are read there: what is enqueued around the products, on addresses.

W ranks; r is this one. The product is done in *rounds*, each with its share of every rank's rows, in one launch. It goes into this
rank's own buffer of the lane. When a round's parts are there on all ranks, a kernel on few SMs reads those of this rank's rows from
all buffers, adds them, and writes the sum; no part is copied. Here with 3 rounds::

    stream   mm 0, set step 1 of all | mm 1, set step 2 of all             | mm 2, set step 3 of all
    local                              wait step 1 of all, read + add 0    | wait step 2 of all, read + add 1    | wait step 3 ...

No kernel waits inside: the local stream waits for signals before it. That stream is urgent (of the highest priority), so the
kernel's programs are the first that get SMs when a tile of the product ends; a product whose programs all stay until its end gives
way only if SMs were left free for that.

An all-reduce passes sums on by a second exchange. A sum also goes into this rank's buffer of it, where it lies as its part did, and
is fetched from there by copy engines, a round late, so that nobody waits for a sum in front of a sum of his own. The last sums,
with nothing to hide behind, go into all ranks' buffers at once, and are copied out there. Into an output that all ranks can write
the kernel puts its sums at once.

Why a part may be written over (PR-1). Everybody writes into his own buffer only, so he has to know that all have read it. Whoever
begins an exchange has waited in the one before for all ranks; and a rank's last step of an exchange is set behind all that it did
in the exchanges before. In an all-reduce the sums come behind the parts, and say it; who puts sums into another rank's buffer has
waited for its parts, so that rank has begun the call. A reduce-scatter on a replayable lane, whose
calls repeat their buffers, takes two exchanges: round 0 has the first one, and all later rounds the second. Their steps::

    first    1: this rank has begun the call, so it has read what the last call's second exchange brought.
             2: round 0 is there.
    second   1 to R - 1: rounds 1 to R - 1 are there. The last one is set behind the sum of round 0: so that was read, too.

The wait for "begun" is in front of round 1's product, behind round 0's: by then it has long been said. A single round has nothing
behind which that could be hidden: there an empty exchange comes first, and everybody waits for it.

Why no order of enqueuing stops (PR-2): a rank sets its step of a round before it waits for that of others, and its sums of a round
before it waits for the sums of others; what it waits for needs nothing that it enqueues later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from crossfade.device.copies import stagger
from crossfade.ops.overlaps import arrivals, copy
from crossfade.ops.turns import Run
from crossfade.peers.exchange import barrier
from crossfade.peers.lane import Epoch, Lane

__all__ = ["Round", "all_reduce", "reduce_scatter"]

_BEGUN = 1


class Round(NamedTuple):
    """A share of every rank's rows.

    Attributes:
        compute: enqueues, on the caller's stream, the products of all ranks' rows, into this rank's buffer of the exchange.
        add: enqueues, on the stream that it is given, the sum of this rank's rows: out of all ranks' buffers of the first exchange,
            into the output and, if there is a second exchange, to where other ranks get it: an output that all can write, this
            rank's buffer of that exchange, or those of all others, if the last argument says that it is the last sum. Gives how
            many bytes go over the links.
        runs: of an all-reduce: every rank's rows: where their sums go here, and where they lie in buffers of the second exchange.
    """

    compute: Callable[[Epoch], None]
    add: Callable[[int, Epoch, Epoch | None, bool], int]
    runs: Mapping[int, Run] | None = None


class _Step(NamedTuple):
    """What says that a round's parts are there.

    Attributes:
        epoch: of the exchange.
        step: of its signals.
        num_steps: that they have.
    """

    epoch: Epoch
    step: int
    num_steps: int


def reduce_scatter(lane: Lane, stream: int, rounds: Sequence[Round], fill: Callable[[], None] | None = None) -> None:
    """Behind it on the lane's local stream, this rank has its sums.

    Args:
        lane: where; all products of the rounds fit into ``lane.buffer_bytes``.
        stream: the caller's; the lane's local stream goes on behind the beginning of the call, and the call's ``stream`` behind all
            exchanges that came before.
        rounds: in order.
        fill: enqueues other work on the stream, while the last parts are read.
    """
    order = stagger(lane.home.rank, lane.home.num_ranks)
    is_split = lane.is_replayable and len(rounds) > 1
    if lane.is_replayable and not is_split:
        barrier(lane, stream)
    steps = _steps(lane, len(rounds), is_split)
    if is_split:
        lane.announce_step(steps[0].epoch, order, stream, _BEGUN)
    for number, (each, at) in enumerate(zip(rounds, steps, strict=True)):
        is_last = at is steps[-1]
        each.compute(at.epoch)
        if is_split and not number:  # and the wait for step 2, which clears it, comes behind this one
            lane.await_step(at.epoch, order, stream, _BEGUN, at.num_steps)
        if not (is_split and is_last):
            lane.announce_step(at.epoch, order, stream, at.step)
        local = lane.fork_local(stream)
        if is_split and is_last:
            lane.announce_step(at.epoch, order, local, at.step)
        if is_last and fill is not None:
            fill()
        lane.await_step(at.epoch, order, local, at.step, at.num_steps)
        lane.num_bytes += each.add(local, at.epoch, None, is_last)


def _steps(lane: Lane, num_rounds: int, is_split: bool) -> list[_Step]:
    """Of each round."""
    first = lane.advance()
    if not is_split:
        return [_Step(first, number + 1, num_rounds) for number in range(num_rounds)]
    second = lane.advance()
    return [_Step(first, _BEGUN + 1, 2), *(_Step(second, number, num_rounds - 1) for number in range(1, num_rounds))]


def all_reduce(lane: Lane, stream: int, rounds: Sequence[Round], *, is_shared: bool) -> None:
    """The same, and this rank has the other ranks' sums.

    Args:
        lane: as above.
        stream: as above.
        rounds: in order.
        is_shared: all ranks write their sums into all outputs. They are free: a rank has begun this call before its parts come.
    """
    order, num_rounds = stagger(lane.home.rank, lane.home.num_ranks), len(rounds)
    parts, sums = lane.advance(), lane.advance()
    for number, each in enumerate(rounds):
        step, is_last = number + 1, number + 1 == num_rounds
        each.compute(parts)
        lane.announce_step(parts, order, stream, step)
        local = lane.fork_local(stream)
        lane.await_step(parts, order, local, step, num_rounds)
        lane.num_bytes += each.add(local, parts, sums, is_last)
        if is_shared:
            continue
        lane.announce_step(sums, order, local, step)
        if number:
            _fetch(lane, sums, rounds, number - 1)
        if is_last:
            _fetch(lane, sums, rounds, number)
    if is_shared:
        lane.announce(sums, order, lane.local, is_batched=True)
        lane.await_full(sums, order, lane.local, is_batched=True)


def _fetch(lane: Lane, sums: Epoch, rounds: Sequence[Round], number: int) -> None:
    """All other ranks' sums of a round: out of their buffers, or, of the last one, out of this rank's."""
    home, runs = lane.home, rounds[number].runs
    assert runs is not None, "an all-reduce knows all ranks' rows"
    is_last = number + 1 == len(rounds)
    lane.await_step(sums, stagger(home.rank, home.num_ranks), lane.local, number + 1, len(rounds))
    for p in arrivals(home.rank, home.num_ranks):
        address, begin, size_bytes = runs[p]
        if not is_last:
            copy(lane, lane.local, address, sums.buffers[p] + begin, size_bytes)
        elif size_bytes:
            home.kernels.copy(lane.local, address, sums.buffers[home.rank] + begin, size_bytes)
