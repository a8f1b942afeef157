"""Sums in turns on the fake machine, in one row with operators in rounds and collectives, on the same lanes.

A reduce-scatter or an all-reduce does what the collective of its name does: the "product" of a piece is a kernel that copies it out
of the input. As in `crossfade.ops.algorithms.rounds`, each piece's product may be enqueued by itself; as in
`crossfade.ops.signaled.tiles`, one launch may stand for all of a turn, whose pieces are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from crossfade.device.copies import stagger
from crossfade.ops.algorithms import schedule
from crossfade.ops.algorithms.schedule import Run, Send, Step
from crossfade.ops.calls.products import cut_evenly, in_order, place, shares
from crossfade.peers import steps
from crossfade.peers.lane import Epoch, Lane
from crossfade.peers.memory import Reduction
from crossfade.testing.fake import FakeDriver
from tests.helpers.worlds.operators import OPERATORS, OpsWorld, Product, draw_options
from tests.helpers.worlds.ranks import WORD, Call, Collective, PeerWorld, Round, Site

SUMS = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
_WORD_BYTES = 64
_MOST_PIECES = 4 * 3 * 2  # rounds, other ranks, pieces


class Way(StrEnum):
    """How a call is done."""

    TURNS = "turns"
    TILES = "tiles"
    """In turns, each with one launch for all pieces."""
    ROUNDS = "rounds"
    COLLECTIVE = "collective"


class _Block(NamedTuple):
    """The rows of one rank."""

    source: int  # where they lie in the input
    product: int  # where their products go
    num_words: int  # their length


class Counters:
    """Words that say that a piece is done: two for each, an eager one that grows and a replayed one that is put back."""

    def __init__(self, driver: FakeDriver, address: int) -> None:
        self._driver, self._address = driver, address
        self._numbers: dict[int, int] = {}

    def count(self, stream: int, index: int, *, is_captured: bool) -> None:
        number = 1 if is_captured else self._numbers.get(index, 0) + 1
        if not is_captured:
            self._numbers[index] = number
        self._driver.write_value(stream, self._at(index, is_captured), number)

    def wait(self, stream: int, *, index: int, is_captured: bool) -> None:
        if is_captured:
            self._driver.wait_and_reset(stream, self._at(index, is_captured), 1, 0)
        else:
            self._driver.wait_value(stream, self._at(index, is_captured), self._numbers[index])

    def _at(self, index: int, is_captured: bool) -> int:
        return self._address + (2 * index + is_captured) * _WORD_BYTES


@dataclass
class TurnsWorld(OpsWorld):
    """Ranks that do the same sums in turns, and other things in between."""

    ways: Sequence[Way] = (Way.TURNS,)
    """Call number k is done in number k modulo their number; what does not sum is never done in turns."""
    lag: int = 0  # of all calls in turns; ``num_parts`` are their rounds
    taper: int = 1
    num_pieces: int = 1  # that a rank's rows of a round are sent in
    is_half_replayed: bool = False  # every other rank makes eager rounds where the others replay

    def rounds_of(self, rank: int) -> Sequence[Round]:
        if self.is_half_replayed and rank % 2:
            return [Round.EAGER if kind is Round.REPLAY else kind for kind in self.rounds]
        return self.rounds

    def _site(self, driver: FakeDriver, rank: int, number: int, memory: int) -> Site:
        site = super()._site(driver, rank, number, memory)
        if site.call.collective not in SUMS:
            return site
        words = driver.allocate(2 * _MOST_PIECES * _WORD_BYTES, f"counters {number} of rank {rank}")
        for index in range(_MOST_PIECES):
            for k, kind in enumerate(("eager", "replayed")):
                label = f"{kind} counter {index} of call {number} of rank {rank}"
                driver.name_range(words + (2 * index + k) * _WORD_BYTES, 4, label)
        return replace(site, held=(*site.held, words), seen=site.seen)

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
            call = _Sums(self, lane, stream, site, is_captured=is_captured, is_by_tiles=way is Way.TILES)
            call.enqueue(local)
            lane.join_local(stream)
            steps.end(lane, stream)

    # What `OpsWorld` keeps as a call's last own memory is in front of the counters here.

    def _reduce_scatter(self, lane: Lane, stream: int, local: int, site: Site, product: Product) -> None:
        super()._reduce_scatter(lane, stream, local, replace(site, held=site.held[:-1]), product)

    def counters(self, driver: FakeDriver, site: Site) -> Counters:
        """Of one call of one rank, kept from round to round."""
        kept: dict[int, Counters] = driver.__dict__.setdefault("counters", {})
        return kept.setdefault(site.number, Counters(driver, site.held[-1]))


class _Sums:
    """One call of one rank; by tiles, one launch stands for all pieces of a turn."""

    def __init__(
        self, world: TurnsWorld, lane: Lane, stream: int, site: Site, *, is_captured: bool, is_by_tiles: bool
    ) -> None:
        driver = lane.memory.driver
        assert isinstance(driver, FakeDriver), "worlds are of the fake machine"
        self._world, self._lane, self._stream, self._site = world, lane, stream, site
        self._is_captured, self._is_by_tiles = is_captured, is_by_tiles
        self._counters = world.counters(driver, site)
        self._ends = [0, *accumulate(shares(world.num_parts, world.taper))]
        self._blocks = self._cut()
        self._num_counted = 0

    def _cut(self) -> list[_Block]:
        site, num_ranks, size = self._site, self._world.num_ranks, WORD.size_bytes
        count = site.call.count
        if site.call.collective is Collective.REDUCE_SCATTER:
            scratch, length = site.held[-2], count * size
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
        sends, launches = [], []
        for p in stagger(home.rank, home.num_ranks):
            begin, end = self._rows(p, number)
            for first, last in cut_evenly(end - begin, self._world.num_pieces) or [(0, 0)]:
                launch = partial(self._multiply, p, begin + first, begin + last)
                index, self._num_counted = self._num_counted, self._num_counted + 1
                wait = None
                if self._is_by_tiles:
                    wait = partial(self._counters.wait, index=index, is_captured=self._is_captured)
                launches.append((launch, index))
                sends.append(self._send(p, begin + first, begin + last, wait, launch))
        return Step(number, sends, partial(self._launch_all, launches) if self._is_by_tiles else None)

    def _launch_all(self, launches: Sequence[tuple[Callable[[], None], int]]) -> None:
        for launch, index in launches:
            launch()
            self._counters.count(self._stream, index, is_captured=self._is_captured)

    def _send(
        self, p: int, begin: int, end: int, wait: Callable[[int], None] | None, launch: Callable[[], None]
    ) -> Send:
        size = WORD.size_bytes
        offset, size_bytes = begin * size, (end - begin) * size
        return Send(p, self._blocks[p].product + offset, offset, size_bytes, wait, None if wait else launch)

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
        way = draw(st.sampled_from([Way.TURNS, Way.TURNS, Way.TILES, Way.TILES, Way.ROUNDS, Way.COLLECTIVE]))
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
        num_pieces=draw(st.integers(1, 2)),
        is_half_replayed=Round.CAPTURE not in rounds and draw(st.booleans()),
    )
