"""Deaths on the fake machine: may a process that lives take rubbish for a result?

`ChainWorld`: A -> B -> C, and A dies. B computes with what comes from A and hands it on to C, all of it enqueued ahead. When A
dies, B's watchdog releases B's streams. They compute rubbish and give it to C with a correct ``full``; C's streams wait for nobody
who is dead. `DeathWorld`: a rank dies in the middle of a collective; what counts is whether a rank whose `check` finds nothing has
the right result.

Races are not looked for here (`kit.no_search_for_races`): streams that were let go by force are in no order with anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from crossfade.device.records import Enqueued
from crossfade.device.ring import num_signals
from crossfade.device.signals import SET, Counter
from crossfade.errors import ChannelBroken
from crossfade.host.processes import Alive
from crossfade.peers import steps
from crossfade.peers.lane import Epoch, Lane
from crossfade.testing.fake import FakeDriver, Fault, Machine, Until
from crossfade.testing.fake.explore import _Run
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.worlds.kit import RingLine, make, use
from tests.helpers.worlds.ranks import WORD, Call, PeerWorld, content, expected

SIZE_BYTES = 16


class Look(StrEnum):
    """What C does before it publishes a value."""

    NONE = "none"
    """Nothing."""
    FLAG = "flag"
    """It looks whether its own watchdog has told it of the death."""
    EARLY = "early"
    """It asks the system, before the value has come."""
    CHECK = "check"
    """It asks the system, after the value has come (`Alive.check`)."""


def made(index: int) -> bytes:
    return bytes([2 * index + 1]) * SIZE_BYTES


def relayed(data: bytes) -> bytes:
    """What B makes of it."""
    return bytes((each + 1) % 256 for each in data)


class _Death:
    """Whether A is dead, in a descriptor that is readable then: what a pidfd is."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.alive = Alive({"A": self._fd})
        self.has_come = False

    def begin(self) -> None:
        if self.has_come:
            os.eventfd_read(self._fd)
        self.has_come = False

    def come(self) -> None:
        os.eventfd_write(self._fd, 1)
        self.has_come = True

    def close(self) -> None:
        self.alive.close()
        os.close(self._fd)


class _Ring(RingLine):
    """A ring between two processes that know each other already."""

    def __init__(self, machine: Machine, here: FakeDriver, there: FakeDriver, num_slots: int) -> None:
        label = f"ring {here.process}{there.process}"
        super().__init__(machine, here, there, label, num_signals(num_slots))
        self.push = here.create_stream(f"push {label}")
        self.out, self.into = self.sender(here, self.push), self.receiver(there, num_slots, SIZE_BYTES)
        self.out.on_record(self.back.take())


@dataclass
class ChainWorld:
    look: Look = Look.CHECK  # what C does before it publishes
    num_values: int = 1  # how many go along the chain
    num_slots: int = 1  # of each ring
    is_marked_first: bool = True  # B's watchdog breaks B's ends off before it lets B's streams go, and not after
    is_relay_publishing: bool = False
    """B gives its values to a host, looking only whether its ends are broken off; C does nothing."""
    num_published: int = field(default=0, init=False)
    _death: _Death = field(default_factory=_Death, init=False)

    def close(self) -> None:
        self._death.close()

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        self._death.begin()
        a, b, c = (FakeDriver(machine, name, device) for device, name in enumerate("ABC"))
        first = _Ring(machine, a, b, self.num_slots)
        second = _Ring(machine, b, c, self.num_slots)
        told: dict[str, bool] = {"B": False, "C": False}
        ended: set[str] = set()
        machine.at_end.append(lambda: machine.allocations.clear())
        programs: dict[str, Program] = {
            "A": self._make(a, first),
            "death": self._die(machine),
            "B": _noted(self._relay(b, first, second, told), "B", ended),
            "watchdog B": self._watch(machine, first, second, told, ended),
        }
        if not self.is_relay_publishing:
            programs["C"] = self._use(c, second, told, ended)
        if self.look is Look.FLAG:
            programs["watchdog C"] = self._hear(told)
        return programs

    def _die(self, machine: Machine) -> Program:
        """At any moment: what A's device has not done then, it does never."""
        for name, queue in machine.queues.items():
            if name.endswith(" of A"):
                queue.clear()
        self._death.come()
        yield from ()

    def _make(self, driver: FakeDriver, ring: _Ring) -> Program:
        compute = driver.create_stream("compute")
        for index in range(self.num_values):
            source = driver.allocate(SIZE_BYTES, f"value {index}")
            ready = make(driver, compute, f"value {index}", source, made(index))
            while not ring.out.try_send(source, SIZE_BYTES, ready=ready):
                yield Until("a credit of B", lambda: ring.back.has_record() or self._death.has_come)
                if self._death.has_come:
                    return
                ring.out.on_record(ring.back.take())
            if index + 1 < self.num_values:
                yield None
            if self._death.has_come:
                return

    def _relay(self, driver: FakeDriver, first: _Ring, second: _Ring, told: Mapping[str, bool]) -> Program:
        compute = driver.create_stream("compute")
        made_here: list[tuple[int, int]] = []
        try:
            for index in range(self.num_values):
                yield Until(f"value {index}", lambda: first.ahead.has_record() or told["B"])
                if not first.ahead.has_record():
                    return
                record = first.ahead.take()
                assert isinstance(record, Enqueued)
                lease = first.into.accept(record, compute)
                target = driver.allocate(SIZE_BYTES, f"relayed value {index}")
                where = Range(lease.address, SIZE_BYTES), Range(target, SIZE_BYTES)
                driver.function(compute, f"relay value {index}", relayed, reads=where[:1], writes=where[1:])
                lease.release()
                ready = driver.create_event()
                driver.record_event(ready, compute)
                made_here.append((ready, target))
                yield None
                while not second.out.try_send(target, SIZE_BYTES, ready=ready):
                    yield Until("a credit of C", lambda: second.back.has_record() or told["B"])
                    if second.back.has_record():
                        second.out.on_record(second.back.take())
        except ChannelBroken:
            return
        for index, (ready, target) in enumerate(made_here if self.is_relay_publishing else []):
            yield from _arrival(driver, ready)
            driver.machine.observe("B", ("told", told["B"]))
            if told["B"]:
                return
            self._publish(driver, index, target)

    def _watch(self, machine: Machine, first: _Ring, second: _Ring, told: dict[str, bool], ended: set[str]) -> Program:
        """B's watchdog: breaks its ends off, and lets its streams go."""

        def mark() -> None:
            told["B"] = True
            first.into.break_off("A died")
            second.out.give_up("A died")

        def missing() -> list[Counter]:
            return [each for each in first.into.signals() if machine.word(each.address).value < each.awaited]

        yield Until("A's end", lambda: self._death.has_come)
        if self.is_marked_first:
            mark()
        while True:
            yield None
            for signal in first.into.signals():
                if not signal.is_set():
                    signal.release()
            if not told["B"]:
                yield None
                mark()
            yield Until("a wait for A, or the end of B", lambda: bool(missing()) or "B" in ended)
            if not missing():
                return

    def _hear(self, told: dict[str, bool]) -> Program:
        """C's watchdog: it has no stream to let go."""
        yield Until("A's end", lambda: self._death.has_come)
        told["C"] = True

    def _use(self, driver: FakeDriver, ring: _Ring, told: Mapping[str, bool], ended: set[str]) -> Program:
        compute = driver.create_stream("compute")
        for index in range(self.num_values):
            yield Until(f"value {index} of B", lambda: ring.ahead.has_record() or "B" in ended)
            if not ring.ahead.has_record():
                return
            record = ring.ahead.take()
            assert isinstance(record, Enqueued)
            lease = ring.into.accept(record, compute)
            target = driver.allocate(SIZE_BYTES, f"result {index}")
            driver.copy(target, lease.address, SIZE_BYTES, compute)
            lease.release()
            ready = driver.create_event()
            driver.record_event(ready, compute)
            yield None
            is_alive_early = self.look is not Look.EARLY or not self._check(driver)
            yield from _arrival(driver, ready)
            if not is_alive_early or self._has_heard(driver, told):
                return
            self._publish(driver, index, target)

    def _has_heard(self, driver: FakeDriver, told: Mapping[str, bool]) -> bool:
        match self.look:
            case Look.CHECK:
                return self._check(driver)
            case Look.FLAG:
                driver.machine.observe(driver.process, ("told", told["C"]))
                return told["C"]
            case _:
                return False

    def _check(self, driver: FakeDriver) -> bool:
        dead = self._death.alive.check()
        driver.machine.observe(driver.process, ("dead", *dead))
        return bool(dead)

    def _publish(self, driver: FakeDriver, index: int, address: int) -> None:
        data = driver.machine.read_bytes(Range(address, SIZE_BYTES), driver.process)
        self.num_published += 1
        if data != relayed(made(index)):
            raise Fault("wrong value", f"{driver.process} publishes rubbish")


def _noted(program: Program, name: str, ended: set[str]) -> Program:
    yield from program
    ended.add(name)


def _arrival(driver: FakeDriver, event: int) -> Program:
    """Until an event has happened, and the host knows."""
    yield driver.until_happened(event)
    driver.has_happened(event)
    yield None


# ranks

VICTIM = 2
QUEUE = "queue 1"
"""Of the stream that computes; queue 0 is that of the lane's local one."""


class OneByOne(Lane):
    """Tells each rank as soon as its block is copied, as the exchanges of operators do: so a rank can die in between."""

    def advance(self) -> Epoch:
        self._epoch, self._untold = super().advance(), list(self.order)
        return self._epoch

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        super().copy(stream, target, source, size_bytes)
        if self._untold:
            super().announce(self._epoch, [self._untold.pop(0)], stream)

    def announce(self, epoch: Epoch, peers: list[int], stream: int, step: int = SET) -> None:
        while self._untold:
            super().announce(epoch, [self._untold.pop(0)], stream, step)


class DeathWorld:
    """Three ranks in one all-reduce, of which the last one dies with ``num_left`` operations undone; the others hear of it later.
    If ``is_asking``, a rank's check asks the system who is alive, and not only its own watchdog.
    """

    def __init__(self, call: Call, num_left: int, *, is_asking: bool) -> None:
        self._num_left = num_left
        self._call = call
        self._is_asking = is_asking
        self._world = PeerWorld([call], num_ranks=3, lane=OneByOne)

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        ranks = self._world.open(machine)
        is_dead: list[bool] = []
        driver, lanes, _ = ranks[VICTIM]
        programs: dict[str, Program] = {"victim": self._die(machine, driver, lanes[0], is_dead)}
        for rank, (driver, lanes, _) in enumerate(ranks[:VICTIM]):
            heard: list[bool] = []
            stream, seen = self._enqueue(driver, lanes[0])
            programs[f"host {rank}"] = self._use(driver, stream, seen, heard, is_dead)
            programs[f"watchdog {rank}"] = self._watch(driver, lanes[0], stream, heard, is_dead)
        machine.at_end.append(lambda: machine.allocations.clear())
        return programs

    def _enqueue(self, driver: FakeDriver, lane: Lane) -> tuple[int, list[bytes]]:
        stream, seen = driver.create_stream("compute"), list[bytes]()
        size_bytes = self._call.count * WORD.size_bytes
        source = driver.allocate(size_bytes, "input")
        target = driver.allocate(size_bytes, "output")
        data = content(driver.device, 0, 0, self._call.count)
        make(driver, stream, "the input", source, data)
        lane.begin(stream, is_captured=False)
        job = steps.Job(target, source, self._call.count, WORD)
        steps.all_reduce([lane], stream, [job])
        use(driver, stream, "the output", target, size_bytes, seen)
        return stream, seen

    def _die(self, machine: Machine, driver: FakeDriver, lane: Lane, is_dead: list[bool]) -> Program:
        self._enqueue(driver, lane)
        queue = machine.queues[f"{QUEUE} of {driver.process}"]
        yield Until("the moment of death", lambda: len(queue) <= self._num_left)
        queue.clear()
        is_dead.append(True)

    def _watch(
        self, driver: FakeDriver, lane: Lane, stream: int, heard: list[bool], is_dead: Sequence[bool]
    ) -> Program:
        """As the watchdog and the group do it: the lane is broken first, then signals are set until the stream has run dry."""
        yield Until("the victim's end", lambda: bool(is_dead))
        heard.append(True)
        while not driver.is_idle(stream):
            for signal in lane.incoming():
                if not signal.is_set():
                    signal.release()
            yield None

    def _use(
        self, driver: FakeDriver, stream: int, seen: Sequence[bytes], heard: Sequence[bool], is_dead: Sequence[bool]
    ) -> Program:
        yield driver.until_idle(stream)
        if heard or (self._is_asking and is_dead):
            return
        sources = [content(rank, 0, 0, self._call.count) for rank in range(3)]
        if list(seen) != [expected(self._call, driver.device, sources)]:
            raise Fault("wrong value", f"{driver.process} takes rubbish for a result")


_LAST = (f"{QUEUE} of rank 1", "watchdog 1")


def drive(world: DeathWorld) -> Fault | None:
    """The victim is quick, then rank 0, and its watchdog; rank 1 is slow, and hears of the death last of all."""

    def place(choice: tuple[str, str]) -> int:
        kind, name = choice
        if name in _LAST:
            return 10 + _LAST.index(name)
        if kind == "queue" or name == "victim":
            return 0 if name in ("victim", f"{QUEUE} of rank {VICTIM}") else 1
        return 2

    run = _Run(world, False)
    try:
        while choices := run.choices():
            run.step(min(choices, key=place))
        run.finish()
    except Fault as fault:
        return fault
    return None
