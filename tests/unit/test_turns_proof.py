"""Whose pushes come before whose, from the plan; and pushes in turns on the fake machine."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued, Record
from crossfade.device.ring import num_signals
from crossfade.device.signals import Counter
from crossfade.edges.turns import PROGRESS_BYTES, Progress, TurnRules, Turns
from crossfade.engines.board import peers_of
from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.actions import Verb
from crossfade.plan.plan import Plan
from crossfade.plan.text import values_used
from crossfade.plan.turns import predecessors, targets, turn_peers
from crossfade.testing.fake import FakeDriver, Machine, Until, sample
from crossfade.testing.fake.clocks import Clock, join
from crossfade.testing.fake.machine import Program
from crossfade.types import DRIVER, Transport
from tests.helpers.small_graphs import actor, call, compiled, gpu_graphs
from tests.helpers.worlds.kit import (
    RingLine,
    assert_sound,
    assert_sound_in_all_orders,
    check_seen,
    kinds,
    make,
    orders,
    use,
)


def test_each_channel_comes_after_the_last_of_another_writer() -> None:
    """R uses a0 of A, then a1 of A, b of B, a2 of A; what one writer pushes is in order already."""
    a, b, r = actor("A", 0), actor("B", 1), actor("R", 2)
    inp = InputNode()
    values = [call(a, "make", inp), call(a, "make", inp), call(b, "make", inp), call(a, "make", inp)]
    plan = compiled(call(r, "take", *values))
    names = [channel.id for channel in sorted(plan.channels, key=lambda each: each.turn) if channel.writer in "AB"]
    a0, a1, third, a2 = names
    assert predecessors(plan) == {(third, "R"): a1, (a2, "R"): third}
    assert a0 not in {channel for channel, _ in predecessors(plan)}
    assert peers_of(plan, "A") == {DRIVER, "B", "R"}
    assert peers_of(plan, "B") == {DRIVER, "A", "R"}
    assert turn_peers(plan, "R", predecessors(plan)) == set()


def test_only_copies_to_one_reader_that_take_its_link_have_turns() -> None:
    inp = InputNode()
    made = [call(actor(f"S{i}", i), "make", inp) for i in range(3)]
    apart = compiled(MultiOutputNode([call(actor(f"R{i}", 3 + i), "take", value) for i, value in enumerate(made)]))
    assert predecessors(apart) == {}
    near = compiled(call(actor("R", 1), "take", *made))  # S1 is on the GPU of R
    assert predecessors(near) == {("n2", "R"): "n0"}
    staged = compiled(call(actor("R", 3), "take", *[value.with_tensor_transport("staged") for value in made]))
    assert predecessors(staged) == {}
    again = InputNode()
    one = compiled(
        call(actor("R", 3), "take", call(actor("S0", 0), "make", again), call(actor("S0", 0), "make", again))
    )
    assert predecessors(one) == {}


def test_a_value_that_is_only_written_after_this_one_is_passed_over() -> None:
    """A writes y for R, then x for B, of which B makes what R uses before y. C's value, used first of all, depends on neither."""
    a, b, c, r = actor("A", 0), actor("B", 1), actor("C", 2), actor("R", 3)
    inp = InputNode()
    first, y, x = call(c, "make", inp), call(a, "make", inp), call(a, "make", inp)
    plan = compiled(call(r, "take", first, call(b, "make", x), y))
    (y_channel,) = (each for each in plan.channels if each.writer == "A" and each.readers == ("R",))
    z_channel = next(each for each in plan.channels if each.writer == "B")
    c_channel = next(each for each in plan.channels if each.writer == "C")
    assert predecessors(plan) == {(z_channel.id, "R"): c_channel.id, (y_channel.id, "R"): c_channel.id}


def test_lanes_lead_to_the_gpu_of_the_same_position_or_to_the_first() -> None:
    inp = InputNode()
    plan = compiled(
        call(actor("R", 4, 5), "take", call(actor("A", 0, 1), "make", inp), call(actor("B", 2), "make", inp))
    )
    assert targets(plan, "A", "R") == (0, 1)
    assert targets(plan, "B", "R") == (0,)
    assert targets(plan, "R", "B") == (0, 0)
    assert targets(plan, "X", "Y") == (0,)


def later(plan: Plan, channel: str) -> set[str]:
    """Channels that are written after this one in each execution: what can be reached from its write, step by step."""
    steps = {(party, index): action for party, actions in plan.programs.items() for index, action in enumerate(actions)}
    puts = {action.target: step for step, action in steps.items() if action.verb in (Verb.WRITE, Verb.SEND)}
    front: list[tuple[str, int]] = [puts[channel]]
    found: set[tuple[str, int]] = set()
    while front:
        party, index = front.pop()
        action = steps[party, index]
        after = [(party, index + 1)] if (party, index + 1) in steps else []
        if action.verb in (Verb.WRITE, Verb.SEND):
            put = plan.channel[action.target]
            after += [
                step
                for step, other in steps.items()
                if step[0] in put.readers
                and (
                    put.value in values_used(plan, other, step[0])
                    if put.is_ordered
                    else (other.verb is Verb.READ and other.target == put.id)
                )
            ]
        new = set(after) - found
        found |= new
        front += new
    return {steps[step].target for step in found if steps[step].verb is Verb.WRITE}


@given(output=gpu_graphs(), overlap=st.booleans())
def test_predecessors_are_used_before_at_the_same_reader_and_never_go_in_a_circle(
    output: MultiOutputNode, overlap: bool
) -> None:
    plan = compiled(output, overlap=overlap)
    before = predecessors(plan)
    order: TopologicalSorter[str] = TopologicalSorter()
    for (name, reader), other in before.items():
        channel, predecessor = plan.channel[name], plan.channel[other]
        assert channel.transport is predecessor.transport is Transport.COPY
        assert reader in channel.readers
        assert reader in predecessor.readers
        assert channel.writer != predecessor.writer
        assert predecessor.turn <= channel.turn
        assert other not in later(plan, name)
        assert predecessor.writer in peers_of(plan, channel.writer)
        assert channel.writer in peers_of(plan, predecessor.writer)
        order.add(name, other)
    order.prepare()


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


class _Lane(RingLine):
    """One writer's ring to the reader, in one plan; behind its signals one for what was pushed."""

    def __init__(self, machine: Machine, writer: FakeDriver, reader: FakeDriver, label: str, num_slots: int) -> None:
        super().__init__(machine, writer, reader, label, num_signals(num_slots) + 1)
        self.machine = machine
        self.told: Clock = {}


@dataclass
class TurnWorld:
    orders: Sequence[Sequence[int]] = ((0, 1, 2),)
    """For each plan, the writers in the order in which the reader uses what they make."""
    sizes_bytes: Sequence[Sequence[int]] = ((16, 16, 16),)  # for each execution, by writer, the length of its value
    num_slots: int = 1  # of each ring
    num_queues: int | None = None  # hardware queues of each process
    progress: type[_Seen] = _Seen  # a class with or without a fault
    is_read: bool = True  # whether the reader takes what comes; otherwise there must be a slot for every value
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
            lanes = [
                _Lane(machine, driver, reader, f"lane {k} of plan {plan}", self.num_slots)
                for k, driver in enumerate(writers)
            ]
            for place, writer in enumerate(order):
                driver = writers[writer]
                turns = self._turns(driver, board, lanes, writer, order[:place][-1:])
                program = self._write(driver, turns, lanes[writer], plan, writer, kernels[writer], pushes[writer])
                programs[f"writer {writer} of plan {plan}"] = program
            programs[f"reader of plan {plan}"] = self._read(reader, [lanes[i] for i in order], order, plan, compute)
        return programs

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
        ring = lane.sender(driver, push)
        pool = Pool(driver)
        for index, sizes in enumerate(self.sizes_bytes):
            size_bytes, number = sizes[writer], index + 1
            source = pool.take(size_bytes, f"value {index} of {lane.label}", "writer").address
            made = content(plan, writer, index, size_bytes)
            ready = make(driver, compute, f"value {index} of {lane.label}", source, made)
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
        rings = [lane.receiver(driver, self.num_slots, slot_bytes) for lane in lanes]
        for index, sizes in enumerate(self.sizes_bytes if self.is_read else ()):
            for lane, ring, writer in zip(lanes, rings, order, strict=True):
                while not isinstance(record := (yield from _next(lane)), Enqueued):
                    ring.on_record(record)
                lease = ring.accept(record, compute)
                seen: list[bytes] = []
                use(driver, compute, f"value {index} of {lane.label}", lease.address, sizes[writer], seen)
                wanted = [content(plan, writer, index, sizes[writer])]
                driver.machine.at_end.insert(0, partial(check_seen, seen, wanted, f"value {index} of {lane.label}"))
                lease.release()


def _next(lane: _Lane) -> Generator[Until | None, None, Record]:
    yield Until(f"a record of {lane.label}", lane.ahead.has_record)
    record: Record = lane.ahead.take()
    return record


def test_two_writers_in_all_orders_of_steps() -> None:
    world = TurnWorld(orders=((0, 1),), sizes_bytes=((16, 16),), is_read=False)
    assert_sound_in_all_orders(world)
    assert world.num_waits
    assert world.num_holds


@pytest.mark.parametrize("num_queues", [None, 1])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_three_writers_and_two_plans_with_orders_that_cross(num_slots: int, num_queues: int | None) -> None:
    world = TurnWorld(((0, 1, 2), (2, 1, 0)), ((16, 16, 16),) * 4, num_slots, num_queues)
    assert_sound(world, range(150))
    assert world.num_waits > 100
    assert world.num_holds > 100


ORDERS = st.sampled_from(list(itertools.permutations(range(3))))
SIZES = st.tuples(*[st.sampled_from([0, 8, 16, 24])] * 3)
WORLDS = st.builds(
    TurnWorld,
    orders=st.lists(ORDERS, min_size=1, max_size=3),
    sizes_bytes=st.lists(SIZES, min_size=1, max_size=5),
    num_slots=st.integers(1, 3),
    num_queues=st.sampled_from([None, 1, 2]),
)


@given(world=WORLDS, seeds=orders(3))
def test_any_plans_of_three_writers(world: TurnWorld, seeds: range) -> None:
    assert_sound(world, seeds)


def test_a_wait_for_what_is_not_enqueued_is_found() -> None:
    """Across two plans it is a circle: each writer waits on its one stream for what is behind the other's wait."""
    world = TurnWorld(((0, 1), (1, 0)), ((16, 16),), progress=HastyProgress)
    assert sample(world, range(50)).kind == "PL-5"
    assert "deadlock" in kinds(world, 50)
