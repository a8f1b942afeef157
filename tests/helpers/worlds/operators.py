"""Operators by copy engines on the fake machine: worlds of peers whose products are copies, so results are those of collectives.

Each operator does what the collective of its name does: the "product" of a part is a kernel that reads the part of the input and
writes it where the product goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from crossfade.device.copies import stagger
from crossfade.ops.algorithms import overlaps, schedule
from crossfade.ops.algorithms.overlaps import Part
from crossfade.ops.algorithms.schedule import Run, Send, Step
from crossfade.ops.calls.products import cut_evenly
from crossfade.peers import steps
from crossfade.peers.lane import SLOT_ALIGNMENT, Epoch, Lane
from crossfade.peers.memory import Reduction
from crossfade.testing.fake import FakeDriver
from tests.helpers.worlds.ranks import WORD, Call, Collective, PeerWorld, Round, Site

OPERATORS = (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL)
Product = Callable[[int, int, int], None]


@dataclass
class OpsWorld(PeerWorld):
    """Ranks that do the same operators."""

    num_parts: int = 1  # rounds of each operator
    is_turned: bool = False  # an all-to-all moves its input, and the products come behind, as in the gradient of one
    never_waits: bool = False  # with a fault: no round of an all-to-all waits for what the one before fetched

    def _site(self, driver: FakeDriver, rank: int, number: int, memory: int) -> Site:
        site = super()._site(driver, rank, number, memory)
        if site.call.collective not in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
            return site
        most = max(site.source_count, site.target_count, 1) * WORD.size_bytes
        return replace(
            site, held=(*site.held, driver.allocate(most, f"products {number} of rank {rank}")), seen=site.seen
        )

    def _enqueue(self, lanes: Sequence[Lane], stream: int, site: Site, *, is_captured: bool) -> None:
        lane = lanes[site.call.lane]
        lane.begin(stream, is_captured=is_captured)
        local = lane.fork_local(stream)

        def product(target: int, source: int, size_bytes: int) -> None:
            if size_bytes:
                lane.memory.kernels.copy(stream, target, source, size_bytes)

        match site.call.collective:
            case Collective.REDUCE_SCATTER:
                self._reduce_scatter(lane, stream, local, site, product)
            case Collective.ALL_REDUCE:
                self._all_reduce(lane, stream, site, product)
            case Collective.ALL_GATHER:
                self._all_gather(lane, stream, local, site, product)
            case Collective.ALL_TO_ALL:
                self._all_to_all(lane, stream, local, site, product)
        lane.join_local(stream)
        steps.end(lane, stream)

    def _cut(self, count: int) -> list[tuple[int, int]]:
        """(begin, end) in bytes of each round's share of ``count`` words."""
        return [(begin * WORD.size_bytes, end * WORD.size_bytes) for begin, end in cut_evenly(count, self.num_parts)]

    def _reduce_scatter(self, lane: Lane, stream: int, local: int, site: Site, product: Product) -> None:
        rank, block, scratch = lane.memory.rank, site.call.count * WORD.size_bytes, site.held[-1]
        cuts = self._cut(site.call.count)
        for begin, end in cuts:
            at = [scratch + p * block + begin for p in range(self.num_ranks)]
            at[rank] = site.target + begin
            rows = [(address, site.source + p * block + begin, end - begin) for p, address in enumerate(at)]
            made = _steps(lane, stream, rows, product, is_offered=False)
            schedule.reduce_scatter(lane, stream, local, made, 1, is_only=len(cuts) == 1)

    def _all_reduce(self, lane: Lane, stream: int, site: Site, product: Product) -> None:
        rank, count, size = lane.memory.rank, site.call.count, WORD.size_bytes
        block = -(-count // self.num_ranks)
        bounds = list(pairwise(min(p * block, count) * size for p in range(self.num_ranks + 1)))
        for begin, end in self._cut(block):
            shares = [(min(first + begin, last), min(first + end, last)) for first, last in bounds]
            rows = [(site.target + first, site.source + first, last - first) for first, last in shares]
            made = _steps(lane, stream, rows, product, is_offered=site.offset is None)
            runs = [{p: Run(target, 0, size_bytes) for p, (target, _, size_bytes) in enumerate(rows)}]
            place = None if site.offset is None else site.offset + shares[rank][0]
            schedule.all_reduce(lane, stream, made, runs, place)

    def _all_gather(self, lane: Lane, stream: int, local: int, site: Site, product: Product) -> None:
        block, rank = site.call.count * WORD.size_bytes, lane.memory.rank
        if site.offset is not None:
            into, offset = site.target, site.offset + rank * block

            def use_there(p: int) -> None:
                """As a product would read it; what is gathered is the output here."""
                read = site.source if p == rank else into + p * block
                product(site.held[-1] + p * block, read, block)
                if p == rank:
                    product(into + rank * block, site.source, block)

            overlaps.all_gather_into(lane, stream, local, Part(site.source, block), offset, use_there)
            return
        work = []
        for begin, end in self._cut(site.call.count):

            def use(p: int, address: int, begin: int = begin, end: int = end) -> None:
                product(site.target + p * block + begin, address, end - begin)

            work.append((Part(site.source + begin, end - begin), use))
        overlaps.all_gather(lane, stream, work)

    def _all_to_all(self, lane: Lane, stream: int, local: int, site: Site, product: Product) -> None:
        rank, block = lane.memory.rank, site.call.count * WORD.size_bytes
        if self.is_turned:
            self._all_to_all_first(lane, stream, site, product)
            return
        for begin, end in self._cut(site.call.count):

            def compute(p: int, address: int | None, begin: int = begin, end: int = end) -> None:
                own = site.target + rank * block + begin
                product(own if address is None else address, site.source + p * block + begin, end - begin)

            received = {p: Part(site.target + p * block + begin, end - begin) for p in lane.memory.peers}
            is_first = not begin or self.never_waits
            overlaps.all_to_all(lane, stream, local, compute, received, is_first=is_first)

    def _all_to_all_first(self, lane: Lane, stream: int, site: Site, product: Product) -> None:
        block, work = site.call.count * WORD.size_bytes, []
        for begin, end in self._cut(site.call.count):

            def use(p: int, address: int, begin: int = begin, end: int = end) -> None:
                product(site.target + p * block + begin, address, end - begin)

            parts = [Part(site.source + p * block + begin, end - begin) for p in range(self.num_ranks)]
            work.append((parts, use))
        overlaps.all_to_all_first(lane, stream, work)


def _steps(
    lane: Lane, stream: int, rows: list[tuple[int, int, int]], product: Product, *, is_offered: bool
) -> list[Step]:
    """One round, with (target, source, length) of each rank's product."""
    memory = lane.memory
    own, _, size_bytes = rows[memory.rank]

    def add(parts: Epoch, sums: Epoch | None) -> None:
        if size_bytes:
            targets = (own, sums.buffers[memory.rank]) if is_offered and sums is not None else (own,)
            slots = (parts.buffers[memory.rank], lane.slot_bytes, memory.rank, memory.num_ranks)
            memory.kernels.reduce(stream, Reduction(WORD, size_bytes // WORD.size_bytes, targets, own, *slots))

    sends = [
        Send(p, rows[p][0], 0, rows[p][2], launch=partial(product, *rows[p]))
        for p in stagger(memory.rank, memory.num_ranks)
    ]
    return [Step(0, sends), Step(0, None, partial(product, *rows[memory.rank]), add)]


def draw_options(draw: st.DrawFn, num_ranks: int, num_lanes: int, *, is_eager: bool) -> dict[str, Any]:
    """What all operators' worlds are drawn with."""
    return {
        "num_queues": draw(st.sampled_from([None, None, 1, 2, 3])),
        "buffer_bytes": SLOT_ALIGNMENT * num_ranks,
        "num_lanes": num_lanes,
        "num_user_streams": num_lanes,
        "is_replayable": not is_eager or draw(st.booleans()),
        "is_launched_elsewhere": draw(st.booleans()),
        "num_parts": draw(st.integers(1, 4)),
        "is_turned": draw(st.booleans()),
    }


@st.composite
def ops_worlds(draw: st.DrawFn) -> OpsWorld:
    """One to four ranks, up to two lanes on a stream each, eager rounds and replays, hardware queues that streams share or not."""
    num_ranks, num_lanes = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    rounds = tuple(draw(st.lists(st.sampled_from(Round), min_size=1, max_size=3)))
    is_eager = set(rounds) == {Round.EAGER}
    calls = []
    for _ in range(draw(st.integers(1, 3))):
        lane = draw(st.integers(0, num_lanes - 1))
        stream = draw(st.integers(0, num_lanes - 1)) if is_eager else lane
        count, is_shared = draw(st.sampled_from([0, 1, 5, 48, 64])), draw(st.booleans())
        operator = draw(st.sampled_from(OPERATORS))
        is_put = is_shared and operator in (Collective.ALL_REDUCE, Collective.ALL_GATHER)
        calls.append(Call(operator, count, lane, stream, is_shared=is_put))
    return OpsWorld(calls, num_ranks, rounds, **draw_options(draw, num_ranks, num_lanes, is_eager=is_eager))
