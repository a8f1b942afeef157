"""Sums in turns on the fake machine, in one row with operators in rounds and collectives, on the same lanes.

A reduce-scatter or an all-reduce does what the collective of its name does: the "product" of a part is a kernel that copies it out
of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from crossfade.device.copies import stagger
from crossfade.ops.algorithms import schedule
from crossfade.ops.algorithms.schedule import Run, Send, Step
from crossfade.ops.calls.products import in_order, place, shares
from crossfade.peers import steps
from crossfade.peers.lane import Epoch, Lane
from crossfade.peers.memory import Reduction
from tests.helpers.worlds.operators import OPERATORS, OpsWorld, draw_options
from tests.helpers.worlds.ranks import WORD, Call, Collective, PeerWorld, Round, Site

SUMS = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


class Way(StrEnum):
    """How a call is done."""

    TURNS = "turns"
    ROUNDS = "rounds"
    COLLECTIVE = "collective"


class _Block(NamedTuple):
    """The rows of one rank."""

    source: int  # where they lie in the input
    product: int  # where their products go
    num_words: int  # their length


@dataclass
class TurnsWorld(OpsWorld):
    """Ranks that do the same sums in turns, and other things in between."""

    ways: Sequence[Way] = (Way.TURNS,)
    """Call number k is done in number k modulo their number; what does not sum is never done in turns."""
    lag: int = 0  # of all calls in turns; ``num_parts`` are their rounds
    taper: int = 1
    is_half_replayed: bool = False  # every other rank makes eager rounds where the others replay

    def rounds_of(self, rank: int) -> Sequence[Round]:
        if self.is_half_replayed and rank % 2:
            return [Round.EAGER if kind is Round.REPLAY else kind for kind in self.rounds]
        return self.rounds

    def _enqueue(self, lanes: Sequence[Lane], stream: int, site: Site, *, is_captured: bool) -> None:
        way = self.ways[site.number % len(self.ways)]
        collective = site.call.collective
        if way is Way.COLLECTIVE or collective not in OPERATORS:
            PeerWorld._enqueue(self, lanes, stream, site, is_captured=is_captured)
        elif way is Way.ROUNDS or collective not in SUMS:
            super()._enqueue(lanes, stream, site, is_captured=is_captured)
        else:
            lane = lanes[site.call.lane]
            lane.begin(stream, is_captured=is_captured)
            local = lane.fork_local(stream)
            _Sums(self, lane, stream, site).enqueue(local)
            lane.join_local(stream)
            steps.end(lane, stream)


class _Sums:
    """One call of one rank."""

    def __init__(self, world: TurnsWorld, lane: Lane, stream: int, site: Site) -> None:
        self._world, self._lane, self._stream, self._site = world, lane, stream, site
        self._ends = [0, *accumulate(shares(world.num_parts, world.taper))]
        self._blocks = self._cut()

    def _cut(self) -> list[_Block]:
        site, num_ranks, size = self._site, self._world.num_ranks, WORD.size_bytes
        count = site.call.count
        if site.call.collective is Collective.REDUCE_SCATTER:
            scratch, length = site.held[-1], count * size
            blocks = [_Block(site.source + p * length, scratch + p * length, count) for p in range(num_ranks)]
            rank = self._lane.memory.rank
            blocks[rank] = blocks[rank]._replace(product=site.target)
            return blocks
        bounds = pairwise(min(p * -(-count // num_ranks), count) for p in range(num_ranks + 1))
        return [_Block(site.source + a * size, site.target + a * size, b - a) for a, b in bounds]

    def enqueue(self, local: int) -> None:
        lane, site, num_rounds = self._lane, self._site, self._world.num_parts
        made = [self._turn(*each) for each in in_order(num_rounds, self._world.lag)]
        if site.call.collective is Collective.REDUCE_SCATTER:
            schedule.reduce_scatter(lane, self._stream, local, made, num_rounds)
            return
        runs = [{p: self._run(p, number) for p in range(self._world.num_ranks)} for number in range(num_rounds)]
        own = self._blocks[lane.memory.rank].product - site.target
        schedule.all_reduce(lane, self._stream, made, runs, None if site.offset is None else site.offset + own)

    def _turn(self, number: int, is_own: bool) -> Step:
        home = self._lane.memory
        if is_own:
            return Step(
                number, None, partial(self._multiply, home.rank, *self._rows(home.rank, number)), self._add(number)
            )
        return Step(number, [self._send(p, *self._rows(p, number)) for p in stagger(home.rank, home.num_ranks)])

    def _send(self, p: int, begin: int, end: int) -> Send:
        size = WORD.size_bytes
        offset, size_bytes = begin * size, (end - begin) * size
        source = self._blocks[p].product + offset
        return Send(p, source, offset, size_bytes, partial(self._multiply, p, begin, end))

    def _rows(self, p: int, number: int) -> tuple[int, int]:
        begin, end = (
            place(self._blocks[p].num_words, each, self._ends[-1]) for each in self._ends[number : number + 2]
        )
        return begin, end

    def _run(self, p: int, number: int) -> Run:
        begin, end = self._rows(p, number)
        offset = begin * WORD.size_bytes
        return Run(self._blocks[p].product + offset, offset, (end - begin) * WORD.size_bytes)

    def _multiply(self, p: int, begin: int, end: int) -> None:
        if begin == end:
            return
        block, size = self._blocks[p], WORD.size_bytes
        target, source = block.product + begin * size, block.source + begin * size
        self._lane.memory.kernels.copy(self._stream, target, source, (end - begin) * size)

    def _add(self, number: int) -> Callable[[Epoch, Epoch | None], None]:
        def add(parts: Epoch, sums: Epoch | None) -> None:
            lane, home = self._lane, self._lane.memory
            own, offset, size_bytes = self._run(home.rank, number)
            if not size_bytes:
                return
            is_offered = sums is not None and self._site.offset is None
            targets = (own, sums.buffers[home.rank] + offset) if sums is not None and is_offered else (own,)
            slots = (parts.buffers[home.rank] + offset, lane.slot_bytes, home.rank, home.num_ranks)
            home.kernels.reduce(self._stream, Reduction(WORD, size_bytes // WORD.size_bytes, targets, own, *slots))

        return add


@st.composite
def turns_worlds(draw: st.DrawFn) -> TurnsWorld:
    """One to four ranks, up to two lanes on a stream each, calls of all kinds, eager rounds and replays."""
    num_ranks, num_lanes = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rounds = tuple(draw(st.lists(st.sampled_from(Round), min_size=1, max_size=3)))
    is_eager = set(rounds) == {Round.EAGER}
    calls, ways = [], []
    for _ in range(draw(st.integers(1, 4))):
        lane = draw(st.integers(0, num_lanes - 1))
        stream = draw(st.integers(0, num_lanes - 1)) if is_eager else lane
        way = draw(st.sampled_from([Way.TURNS, Way.TURNS, Way.ROUNDS, Way.COLLECTIVE]))
        known = {Way.ROUNDS: OPERATORS, Way.COLLECTIVE: tuple(Collective)}
        collective = draw(st.sampled_from(known.get(way, SUMS)))
        is_put = draw(st.booleans()) and collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER)
        count = draw(st.sampled_from([0, 1, 5, 48, 64]))
        calls.append(Call(collective, count, lane, stream, is_shared=is_put))
        ways.append(way)
    return TurnsWorld(
        calls,
        num_ranks,
        rounds,
        **draw_options(draw, num_ranks, num_lanes, is_eager=is_eager),
        ways=ways,
        lag=draw(st.integers(0, 3)),
        taper=draw(st.integers(1, 3)),
        is_half_replayed=Round.CAPTURE not in rounds and draw(st.booleans()),
    )
