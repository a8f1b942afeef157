"""Writers that wait for their turn never stop, in any order of steps; and what would make them stop is found."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued, Record
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import Counter, HostBoard, SignalBoard
from crossfade.edges.turns import PROGRESS_BYTES, Progress, TurnRules, Turns
from crossfade.host.memory import Memory
from crossfade.testing.fake import FakeDriver, FakeLink, Fault, Machine, Until, explore, sample
from crossfade.testing.fake.clocks import Clock, join
from crossfade.testing.fake.machine import Range
from tests.helpers.device_worlds import scratch

Program = Iterator[Until | None]
LARGE_BYTES = 16
RULES = TurnRules(LARGE_BYTES, 1e-9)
"""A value of 16 bytes is held for 16 s on the clock of the world, which goes on by 8 s with each look."""


def content(plan: int, writer: int, index: int, size_bytes: int) -> bytes:
    return bytes([1 + 64 * plan + 16 * writer + index]) * size_bytes


class _Seen(Progress):
    """What a host does by it is noted, since it depends on the order of steps; and it learns what the writer's host knew then."""

    def __init__(self, board: mmap.mmap, offset: int, counter: Counter, lane: _Lane, process: str) -> None:
        super().__init__(board, offset, counter)
        self._lane = lane
        self._process = process

    def tell(self, number: int, *, is_large: bool) -> None:
        super().tell(number, is_large=is_large)
        machine = self._lane.machine
        self._lane.told = dict(machine.line(self._process).clock)
        machine.observe(self._process, ("tells", self._lane.label, number))

    def is_behind(self, number: int) -> bool:
        is_behind = super().is_behind(number)
        machine = self._lane.machine
        machine.observe(self._process, ("behind", self._lane.label, number, is_behind))
        if not is_behind:
            join(machine.line(self._process).clock, self._lane.told)
        return is_behind


class HastyProgress(_Seen):
    """Waits for what it takes to come, enqueued or not."""

    def is_behind(self, number: int) -> bool:
        return False

    def is_coming(self, number: int) -> bool:
        return True


@dataclass
class _Lane:
    """One writer's ring to the reader, in one plan."""

    machine: Machine
    label: str
    memory: Memory
    ahead: FakeLink
    back: FakeLink
    num_signals: int
    told: Clock = field(default_factory=dict)

    def board(self, driver: FakeDriver) -> SignalBoard:
        return HostBoard(driver, self.memory, self.num_signals, self.label)


@dataclass
class TurnWorld:
    """See the module.

    Attributes:
        orders: for each plan, the writers in the order in which the reader uses what they make.
        sizes_bytes: for each execution, by writer, the length of its value.
        num_slots: of each ring.
        num_queues: hardware queues of each process.
        progress: a class with or without a fault.
        is_read: whether the reader takes what comes; otherwise there must be a slot for every value.
    """

    orders: Sequence[Sequence[int]] = ((0, 1, 2),)
    sizes_bytes: Sequence[Sequence[int]] = ((16, 16, 16),)
    num_slots: int = 1
    num_queues: int | None = None
    progress: type[_Seen] = _Seen
    is_read: bool = True
    num_waits: int = field(default=0, init=False)
    num_holds: int = field(default=0, init=False)

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        num_writers = len(self.orders[0])
        reader = FakeDriver(machine, "reader", num_writers, num_queues=self.num_queues)
        writers = [FakeDriver(machine, f"writer {i}", i, num_queues=self.num_queues) for i in range(num_writers)]
        pushes = [driver.create_stream("push") for driver in writers]
        kernels = [driver.create_stream("compute") for driver in writers]
        compute = reader.create_stream("compute")
        machine.at_end.append(machine.allocations.clear)
        programs: dict[str, Program] = {}
        for plan, order in enumerate(self.orders):
            board = mmap.mmap(-1, PROGRESS_BYTES * num_writers)
            lanes = [self._lane(machine, plan, writer) for writer in range(num_writers)]
            for place, writer in enumerate(order):
                driver = writers[writer]
                turns = self._turns(driver, board, lanes, writer, order[:place][-1:])
                program = self._write(driver, turns, lanes[writer], plan, writer, kernels[writer], pushes[writer])
                programs[f"writer {writer} of plan {plan}"] = program
            programs[f"reader of plan {plan}"] = self._read(reader, [lanes[i] for i in order], order, plan, compute)
        return programs

    def _lane(self, machine: Machine, plan: int, writer: int) -> _Lane:
        names = f"writer {writer}", "reader"
        number = num_signals(self.num_slots) + 1
        ahead, back = FakeLink(machine, *names), FakeLink(machine, *reversed(names))
        return _Lane(machine, f"lane {writer} of plan {plan}", scratch(number * 64), ahead, back, number)

    def _turns(
        self, driver: FakeDriver, board: mmap.mmap, lanes: Sequence[_Lane], writer: int, before: Sequence[int]
    ) -> Turns:
        def progress(of: int) -> Progress:
            counter = lanes[of].board(driver).counter(num_signals(self.num_slots), f"pushed of {lanes[of].label}")
            return self.progress(board, of * PROGRESS_BYTES, counter, lanes[of], driver.process)

        looks = iter(range(0, 1_000_000, 8))
        held: Callable[[float], None] = self._held
        own = {0: progress(writer)}
        return Turns(RULES, 1, own, {0: [progress(of) for of in before]} if before else {}, (), held, looks.__next__)

    def _held(self, left_s: float) -> None:
        self.num_holds += 1

    def _write(
        self, driver: FakeDriver, turns: Turns, lane: _Lane, plan: int, writer: int, compute: int, push: int
    ) -> Program:
        ring = RingSender(driver, lane.board(driver), push, lane.ahead.send, lane.label)
        pool = Pool(driver)
        for index, sizes in enumerate(self.sizes_bytes):
            size_bytes, number = sizes[writer], index + 1
            source = pool.take(size_bytes, f"value {index} of {lane.label}", "writer").address
            ready = driver.create_event()
            made = content(plan, writer, index, size_bytes)
            driver.kernel(compute, f"make value {index} of {lane.label}", writes=((source, made),))
            driver.record_event(ready, compute)
            while not ring.can_send(size_bytes):
                yield Until(f"a credit of {lane.label}", lane.back.has_record)
                ring.on_record(lane.back.take())
            while turns.must_hold(number, {0: size_bytes}):
                yield None
            self.num_waits += len(turns._coming(0, number, size_bytes))
            turns.wait(0, number, size_bytes, push)
            ring.send([(0, source, size_bytes)], size_bytes, ready=ready)
            turns.mark(0, number, size_bytes, push)
            turns.tell(number)
            turns.ring()
            yield None

    def _read(
        self, driver: FakeDriver, lanes: Sequence[_Lane], order: Sequence[int], plan: int, compute: int
    ) -> Program:
        slot_bytes = max(max(sizes) for sizes in self.sizes_bytes)
        rings = [
            RingReceiver(
                driver,
                Pool(driver),
                lane.board(driver),
                lane.back.send,
                lane.label,
                num_slots=self.num_slots,
                slot_bytes=slot_bytes,
            )
            for lane in lanes
        ]
        for index, sizes in enumerate(self.sizes_bytes if self.is_read else ()):
            for lane, ring, writer in zip(lanes, rings, order, strict=True):
                while not isinstance(record := (yield from _next(lane)), Enqueued):
                    ring.on_record(record)
                lease = ring.accept(record, compute)
                seen: list[bytes] = []
                where = Range(lease.address, sizes[writer])
                driver.kernel(compute, f"use value {index} of {lane.label}", reads=(where,), seen=seen)
                expected = content(plan, writer, index, sizes[writer])
                driver.machine.at_end.insert(0, _comparison(seen, expected, lane.label))
                lease.release()


def _next(lane: _Lane) -> Generator[Until | None, None, Record]:
    yield Until(f"a record of {lane.label}", lane.ahead.has_record)
    record: Record = lane.ahead.take()
    return record


def _comparison(seen: list[bytes], expected: bytes, label: str) -> Callable[[], None]:
    def check() -> None:
        if seen != [expected]:
            raise Fault("wrong value", f"{label} brought {seen}")

    return check


NUM_ORDERS = 3
"""Orders of steps that are tried of each world that hypothesis draws."""


def test_two_writers_in_all_orders_of_steps() -> None:
    world = TurnWorld(orders=((0, 1),), sizes_bytes=((16, 16),), is_read=False)
    verdict = explore(world)
    assert verdict.is_ok, verdict
    assert verdict.is_complete
    assert world.num_waits
    assert world.num_holds


@pytest.mark.parametrize("num_queues", [None, 1])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_three_writers_and_two_plans_with_orders_that_cross(num_slots: int, num_queues: int | None) -> None:
    world = TurnWorld(((0, 1, 2), (2, 1, 0)), ((16, 16, 16),) * 4, num_slots, num_queues)
    verdict = sample(world, range(150))
    assert verdict.is_ok, verdict
    assert world.num_waits > 100
    assert world.num_holds > 100


ORDERS = st.sampled_from(list(itertools.permutations(range(3))))
SIZES = st.tuples(*[st.sampled_from([0, 8, 16, 24])] * 3)


@given(
    orders=st.lists(ORDERS, min_size=1, max_size=3),
    sizes_bytes=st.lists(SIZES, min_size=1, max_size=5),
    num_slots=st.integers(1, 3),
    num_queues=st.sampled_from([None, 1, 2]),
    first=st.integers(0, 1 << 32),
)
def test_any_plans_of_three_writers(
    orders: list[tuple[int, ...]],
    sizes_bytes: list[tuple[int, ...]],
    num_slots: int,
    num_queues: int | None,
    first: int,
) -> None:
    world = TurnWorld(orders, sizes_bytes, num_slots, num_queues)
    verdict = sample(world, range(first, first + NUM_ORDERS))
    assert verdict.is_ok, verdict


def test_a_wait_for_what_is_not_enqueued_is_found() -> None:
    """Across two plans it is a circle: each writer waits on its one stream for what is behind the other's wait."""
    world = TurnWorld(((0, 1), (1, 0)), ((16, 16),), progress=HastyProgress)
    assert sample(world, range(50)).kind == "PL-5"
    verdicts = [sample(world, [seed], is_strict=False) for seed in range(50)]
    assert "deadlock" in {verdict.kind for verdict in verdicts}
