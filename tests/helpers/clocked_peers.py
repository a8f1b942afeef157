"""Ranks on GPUs with a clock and nothing else, that do the collectives of `crossfade.peers`: for tests of how long these take."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from crossfade.peers import steps
from crossfade.peers.lane import NUM_EPOCHS, Lane
from crossfade.peers.memory import Kind, Reduction
from crossfade.schedule.cost import CostModel
from crossfade.topology import Crowd, Device, Launch, Link, LinkKind, Rate, Topology
from crossfade.types import CollectiveKind
from tests.helpers.clocked import Clocked, ClockedDriver, Op, Speeds
from tests.helpers.worlds.ranks import open_homes

NUM_LANES = 2
WORD = Kind("float32", 4)
SPEEDS = Speeds(
    copy_gbs=100.0,
    overhead_us=5.0,
    memory_op_us=8.0,
    host_us=dict.fromkeys(("copy", "word", "event", "kernel", "graph"), 0.0),
)
KERNEL_US, MEMORY_GBS = 3.0, 1000.0


class _Kernels:
    """The local part: what it reads and writes, over one rate."""

    def __init__(self, driver: ClockedDriver) -> None:
        self._driver = driver

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        self._enqueue(stream, 2 * size_bytes)

    def reduce(self, stream: int, reduction: Reduction) -> None:
        touched = reduction.num_ranks + len(reduction.targets)
        self._enqueue(stream, touched * reduction.count * reduction.kind.size_bytes)

    def _enqueue(self, stream: int, moved_bytes: int) -> None:
        op = Op("kernel", KERNEL_US + moved_bytes / MEMORY_GBS / 1e3, (self._driver.device,))
        self._driver.enqueue(stream, op, "kernel")


class Ranks:
    """Some ranks, each with a driver, a stream for its collectives, and lanes."""

    def __init__(self, num_ranks: int, buffer_bytes: int) -> None:
        machine = Clocked(SPEEDS)
        self.drivers = [ClockedDriver(machine, rank) for rank in range(num_ranks)]
        homes, _ = open_homes(self.drivers, _Kernels, NUM_LANES, NUM_EPOCHS * NUM_LANES * buffer_bytes)
        self.lanes = [[Lane(home, index, buffer_bytes) for index in range(NUM_LANES)] for home in homes]
        self.streams = [driver.create_stream("collectives") for driver in self.drivers]
        self._tensors = [driver.allocate(1, "tensors") for driver in self.drivers]

    def enqueue(self, rank: int, kind: CollectiveKind, size_bytes: int, root: int) -> None:
        """One rank's part, as `crossfade.collectives.movers.copies` calls it."""
        lanes, stream, source = self.lanes[rank], self.streams[rank], self._tensors[rank]
        target = source + size_bytes
        chosen = lanes if kind.reduces else lanes[:1]
        for lane in chosen:
            lane.begin(stream)
        match kind:
            case CollectiveKind.ALLGATHER:
                steps.all_gather(lanes[0], stream, target, source, size_bytes)
            case CollectiveKind.BROADCAST:
                steps.broadcast(lanes[0], stream, root, target, source, size_bytes)
            case CollectiveKind.ALLREDUCE:
                steps.all_reduce(lanes, stream, [steps.Job(target, source, size_bytes // 4, WORD)])
            case CollectiveKind.REDUCESCATTER:
                count = size_bytes // 4 // len(self.drivers)
                steps.reduce_scatter(lanes, stream, [steps.Job(target, source, count, WORD)])
        for lane in chosen:
            steps.end(lane, stream)

    def lasts_us(self, kind: CollectiveKind, size_bytes: int, root: int = 0) -> float:
        """From the beginning until the last rank is done."""
        timers: list[Any] = []
        for rank, driver in enumerate(self.drivers):
            begin, end = driver.create_timer(), driver.create_timer()
            driver.record_event(begin, self.streams[rank])
            self.enqueue(rank, kind, size_bytes, root)
            driver.record_event(end, self.streams[rank])
            timers.append((driver, begin, end))
        assert all(driver.has_happened(end) for driver, _, end in timers)
        return max(float(driver.elapsed_us(begin, end)) for driver, begin, end in timers)


def costs_of(num_ranks: int) -> CostModel:
    """What a calibration would find of these ranks. An exchange counts two signals, and there takes one operation."""
    uuids = [f"GPU-{rank}" for rank in range(num_ranks)]
    lasts_us = {size: SPEEDS.overhead_us + size / SPEEDS.copy_gbs / 1e3 for size in (1, 1 << 30)}
    rates = [Rate("copy", size, time_us) for size, time_us in lasts_us.items()]
    signal_us = SPEEDS.memory_op_us / 2
    links = [Link(*pair, LinkKind.NVLINK, signal_us=signal_us).with_rates(rates) for pair in permutations(uuids, 2)]
    neighbours = tuple(zip(uuids, (*uuids[1:], uuids[0]), strict=True))
    launches = tuple(Launch(uuid, name, 0.0) for uuid in uuids for name in ("copy", "write", "wait", "kernel"))
    topology = Topology(
        tuple(Device(uuid, "clocked", 132, 10**11) for uuid in uuids),
        tuple(links),
        crowds=(Crowd("copy", neighbours, 1 << 30, lasts_us[1 << 30]),),
        launches=launches,
    )
    return CostModel(topology=topology, kernel_us=KERNEL_US, memory_gbs=MEMORY_GBS)
