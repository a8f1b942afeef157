"""Small worlds for the fake machine: ranks that share buffers and signals, and do one collective after another on lanes.

The "sum" of blocks here is a fold that depends on their order, so that a reduction in another order than that of the ranks shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from crossfade.device.capture import Replay, capture
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.peers import steps
from crossfade.peers.exchange import barrier
from crossfade.peers.lane import NUM_EPOCHS, Lane, num_words
from crossfade.peers.memory import GroupMemory, Kind, Reduction
from crossfade.peers.staged_memory import StagedKernels
from crossfade.testing.fake import FakeDriver, Fault, Machine
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.worlds.kit import finish, scratch

WORD = Kind("int32", 4)
_MASK = 0xFFFF_FFFF


ROOT = 1


class Collective(StrEnum):
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    """From rank 1, if there is one."""
    BARRIER = "barrier"


class Round(StrEnum):
    """How all calls are made once."""

    EAGER = "eager"
    REPLAY = "replay"
    """By launching a graph; it is captured when the first one is due."""
    CAPTURE = "capture"
    """Not at all: the graph is captured, and not launched."""


@dataclass(frozen=True)
class Call:
    collective: Collective  # which
    count: int = 8  # words in one block
    lane: int = 0  # where
    stream: int = 0
    is_in_place: bool = False  # the output lies where the input lies, as far as that is allowed
    is_shared: bool = False  # the other ranks write the output themselves, where that is possible
    more_lanes: tuple[int, ...] = ()  # for further pieces of a sum

    @property
    def is_put(self) -> bool:
        """Whether the other ranks write the output."""
        return self.is_shared and self.collective in (
            Collective.ALL_GATHER,
            Collective.ALL_TO_ALL,
            Collective.ALL_REDUCE,
        )


def fold(*blocks: bytes) -> bytes:
    """In the place of a sum: every word of the first block, times 31, plus that of the second, and so on."""
    rows = [array("I", block) for block in blocks]
    return array(
        "I", [reduce(lambda total, word: (total * 31 + word) & _MASK, words) for words in zip(*rows, strict=True)]
    ).tobytes()


def content(rank: int, number: int, version: int, count: int) -> bytes:
    first = 1 + 1_000_003 * rank + 7_919 * number + 104_729 * version
    return array("I", [(first + 31 * i) & _MASK for i in range(count)]).tobytes()


def expected(call: Call, rank: int, sources: Sequence[bytes]) -> bytes:
    """What a call gives, by plain computation."""
    size = call.count * WORD.size_bytes
    match call.collective:
        case Collective.ALL_GATHER:
            return b"".join(sources)
        case Collective.ALL_TO_ALL:
            return b"".join(source[rank * size : (rank + 1) * size] for source in sources)
        case Collective.REDUCE_SCATTER:
            return fold(*(source[rank * size : (rank + 1) * size] for source in sources))
        case Collective.ALL_REDUCE:
            return fold(*sources)
        case Collective.BROADCAST:
            return sources[ROOT % len(sources)]
        case Collective.BARRIER:
            return b""


class FakeKernels:
    """The local part, which tells the machine what it reads and writes (see `crossfade.peers.memory.Kernels`)."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        name = self._driver._name
        label = f"put {name(source, size_bytes)} into {name(target, size_bytes)}"
        reads, writes = (Range(source, size_bytes),), (Range(target, size_bytes),)
        self._driver.function(stream, label, bytes, reads=reads, writes=writes)

    def reduce(self, stream: int, reduction: Reduction) -> None:
        size_bytes = reduction.count * reduction.kind.size_bytes
        reads = tuple(Range(address, size_bytes) for address in reduction.sources())
        writes = tuple(Range(address, size_bytes) for address in reduction.targets)
        label = f"sum up into {self._driver._name(*writes[0])}"
        self._driver.function(stream, label, fold, reads=reads, writes=writes)


def open_homes(
    drivers: Sequence[Any], kernels: Callable[[Any], Any], num_lanes: int, total_bytes: int
) -> tuple[list[GroupMemory], list[int]]:
    """Of ranks with a driver each; and each rank's buffers, which the others reach."""
    words = num_words(num_lanes, len(drivers))
    boards = [scratch(words * WORD_BYTES) for _ in drivers]
    buffers = [driver.allocate(total_bytes, f"buffers of rank {k}") for k, driver in enumerate(drivers)]
    homes = []
    for rank, driver in enumerate(drivers):
        views = [HostBoard(driver, memory, words, f"rank {k}") for k, memory in enumerate(boards)]
        homes.append(GroupMemory(driver, kernels(driver), rank, len(drivers), buffers, total_bytes, views))
    return homes, buffers


@dataclass
class Site:
    """One call, as one rank has it: where its input and output lie, and what was seen."""

    number: int
    call: Call
    source: int
    target: int
    source_count: int
    target_count: int
    held: tuple[int, ...]
    offset: int | None
    seen: list[bytes] = field(default_factory=list)


@dataclass
class PeerWorld:
    calls: Sequence[Call]  # in order, once in each round
    num_ranks: int = 2
    rounds: Sequence[Round] = (Round.EAGER,)  # how often and how; the inputs change from round to round
    num_queues: int | None = None  # hardware queues of each rank
    buffer_bytes: int = 1024  # of each lane's two buffers; what is longer is done in pieces
    num_lanes: int = 1
    num_user_streams: int = 1
    is_replayable: bool = False  # of the lanes
    orders: Sequence[Sequence[int]] = ()
    """Rank k enqueues the calls in order number k modulo their number; none for the order of ``calls``."""
    is_launched_elsewhere: bool = False  # graphs are launched on another stream than the one they were captured on
    lane: Callable[..., Lane] = Lane  # the class, with or without a fault
    is_staged: bool = False  # sums are added up in a mirror of this rank's buffers
    cut_bytes: int = 0  # of the lanes: tensors of more are cut into pieces

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        ranks = self.open(machine)
        return {f"host {rank}": self._run(*each) for rank, each in enumerate(ranks)}

    def open(self, machine: Machine) -> list[tuple[FakeDriver, list[Lane], int]]:
        """Each rank's driver, lanes, and buffers, which the others reach."""
        drivers = [
            FakeDriver(machine, f"rank {rank}", rank, num_queues=self.num_queues) for rank in range(self.num_ranks)
        ]
        total_bytes = self._heap_begin(len(self.calls))
        homes, memory = open_homes(drivers, FakeKernels, self.num_lanes, total_bytes)
        if self.is_staged:
            homes = [self._staged(*each, total_bytes) for each in zip(homes, memory, strict=True)]
        lanes = [[self._lane(home, k) for k in range(self.num_lanes)] for home in homes]
        return list(zip(drivers, lanes, memory, strict=True))

    @staticmethod
    def _staged(home: GroupMemory, buffers: int, total_bytes: int) -> GroupMemory:
        mirror = home.driver.allocate(total_bytes, f"mirror of rank {home.rank}")
        return replace(home, kernels=StagedKernels(home.driver, home.kernels, buffers, mirror))

    def rounds_of(self, rank: int) -> Sequence[Round]:
        """How one rank makes all calls."""
        return self.rounds

    def _heap_begin(self, number: int) -> int:
        """Where in the ranks' memory the output of a call lies that they all write: behind the lanes' buffers."""
        before = self.calls[:number]
        heap_bytes = sum(self.num_ranks * max(call.count, 1) * WORD.size_bytes for call in before if call.is_put)
        return NUM_EPOCHS * self.num_lanes * self.buffer_bytes + heap_bytes

    def _lane(self, home: GroupMemory, index: int) -> Lane:
        options = {"is_replayable": self.is_replayable, "cut_bytes": self.cut_bytes}
        return self.lane(home, index, self.buffer_bytes, **options)

    def _run(self, driver: FakeDriver, lanes: Sequence[Lane], shared: int) -> Program:
        rank = driver.device
        streams = [driver.create_stream(f"compute {k}") for k in range(self.num_user_streams)]
        main = driver.create_stream("launches") if self.is_launched_elsewhere else streams[0]
        event = driver.create_event()
        order = self.orders[rank % len(self.orders)] if self.orders else range(len(self.calls))
        sites = [self._site(driver, rank, number, shared) for number in order]
        replay: Replay | None = None
        for version, kind in enumerate(self.rounds_of(rank)):
            if kind is Round.EAGER:
                for site in sites:
                    self._eager(driver, lanes, streams, site, version)
                    yield None
                continue
            if replay is None:
                replay = capture(driver, streams[0], lambda: self._captured(lanes, streams, sites), streams[1:])
                yield None
            if kind is Round.REPLAY:
                others = [stream for stream in streams if stream != main]
                self._replay(driver, replay, main, others, sites, version, event)
                yield None
        streams = [*streams, main] if self.is_launched_elsewhere else streams
        yield from self._end(driver, lanes, streams)
        if replay is not None:
            replay.close()
        driver.destroy_event(event)
        self._give_back(driver, lanes, streams, [shared, *(at for site in sites for at in site.held)])
        self._check(rank, sites)

    def _site(self, driver: FakeDriver, rank: int, number: int, memory: int) -> Site:
        call, parts = self.calls[number], self.num_ranks
        is_as_long = call.collective in (Collective.ALL_REDUCE, Collective.BROADCAST)
        num_in = 1 if is_as_long or call.collective is Collective.ALL_GATHER else parts
        num_out = 1 if is_as_long or call.collective is Collective.REDUCE_SCATTER else parts
        if call.collective is Collective.BARRIER:
            num_in = num_out = 0
        counts = num_in * call.count, num_out * call.count
        most = max(*counts, 1) * WORD.size_bytes
        part = rank * call.count * WORD.size_bytes
        held = []

        def place(what: str) -> int:
            held.append(driver.allocate(most, f"{what} {number} of rank {rank}"))
            return held[-1]

        offset = self._heap_begin(number) if call.is_put else None
        if offset is None:
            target = place("output")
        else:
            target = memory + offset
            driver.name_range(target, most, f"output {number} of rank {rank}")
        if call.is_in_place and call.collective is Collective.REDUCE_SCATTER:
            source, target = target, target + part
        elif call.is_in_place and call.collective is not Collective.ALL_TO_ALL:
            source = target + (part if num_in < num_out else 0)
        else:
            source = place("input")
        return Site(number, call, source, target, *counts, tuple(held), offset)

    # rounds

    def _make(self, driver: FakeDriver, stream: int, site: Site, version: int) -> None:
        data = content(driver.device, site.number, version, site.source_count)
        driver.kernel(stream, f"make input {site.number} of round {version}", writes=((site.source, data),))

    def _use(self, driver: FakeDriver, stream: int, site: Site, version: int) -> None:
        where = Range(site.target, site.target_count * WORD.size_bytes)
        driver.kernel(stream, f"use output {site.number} of round {version}", reads=(where,), seen=site.seen)

    def _enqueue(self, lanes: Sequence[Lane], stream: int, site: Site, *, is_captured: bool) -> None:
        call, lane = site.call, lanes[site.call.lane]
        row = [lane, *(lanes[number] for number in call.more_lanes)]
        for each in row:
            each.begin(stream, is_captured=is_captured)
        source, target, size_bytes = site.source, site.target, call.count * WORD.size_bytes
        match call.collective:
            case Collective.ALL_GATHER:
                steps.all_gather(lane, stream, target, source, size_bytes, site.offset)
            case Collective.ALL_TO_ALL:
                steps.all_to_all(lane, stream, target, source, size_bytes, site.offset)
            case Collective.REDUCE_SCATTER:
                steps.reduce_scatter(row, stream, [steps.Job(target, source, call.count, WORD)])
            case Collective.ALL_REDUCE:
                steps.all_reduce(row, stream, [steps.Job(target, source, call.count, WORD, site.offset)])
            case Collective.BROADCAST:
                steps.broadcast(lane, stream, ROOT % self.num_ranks, target, source, size_bytes)
            case Collective.BARRIER:
                barrier(lane, stream)
        for each in row:
            steps.end(each, stream)

    def _eager(
        self, driver: FakeDriver, lanes: Sequence[Lane], streams: Sequence[int], site: Site, version: int
    ) -> None:
        stream = streams[site.call.stream]
        self._make(driver, stream, site, version)
        self._enqueue(lanes, stream, site, is_captured=False)
        self._use(driver, stream, site, version)

    def _captured(self, lanes: Sequence[Lane], streams: Sequence[int], sites: Sequence[Site]) -> None:
        for site in sites:
            self._enqueue(lanes, streams[site.call.stream], site, is_captured=True)

    def _replay(
        self,
        driver: FakeDriver,
        replay: Replay,
        main: int,
        others: Sequence[int],
        sites: Sequence[Site],
        version: int,
        event: int,
    ) -> None:
        """The caller orders a launch behind what came before on the lanes, and what comes next behind the launch."""
        for stream in others:
            driver.record_event(event, stream)
            driver.wait_event(main, event)
        for site in sites:
            self._make(driver, main, site, version)
        replay.launch(main)
        for site in sites:
            self._use(driver, main, site, version)
        driver.record_event(event, main)
        for stream in others:
            driver.wait_event(stream, event)

    # the end

    def _end(self, driver: FakeDriver, lanes: Sequence[Lane], streams: Sequence[int]) -> Program:
        """As a group closes: a last exchange on each lane; behind it nobody uses this rank's memory."""
        for lane in lanes:
            lane.begin(streams[0], is_captured=False)
            barrier(lane, streams[0])
        yield from finish(driver, streams)

    def _give_back(
        self, driver: FakeDriver, lanes: Sequence[Lane], streams: Sequence[int], held: Sequence[int]
    ) -> None:
        for lane in lanes:
            lane.close()
        for board in lanes[0].memory.boards:
            board.close()
        for stream in streams:
            driver.destroy_stream(stream)
        kernels = lanes[0].memory.kernels
        for address in (*held, *([kernels.mirror] if isinstance(kernels, StagedKernels) else [])):
            driver.free(address)
        if driver.ledger.held():
            raise Fault("leak", f"{driver.process} still holds {', '.join(driver.ledger.held())}")

    def _check(self, rank: int, sites: Sequence[Site]) -> None:
        versions = [version for version, kind in enumerate(self.rounds_of(rank)) if kind is not Round.CAPTURE]
        for site in sites:
            for version, got in zip(versions, site.seen, strict=True):
                sources = [content(k, site.number, version, site.source_count) for k in range(self.num_ranks)]
                if got != expected(site.call, rank, sources):
                    what = f"output {site.number} ({site.call.collective}) of round {version} on rank {rank}"
                    raise Fault("wrong value", f"{what} is wrong", f"use output {site.number} of round {version}")
