"""A chain A -> B -> C on the fake machine, in which A dies: do B and C take rubbish for a result?

B computes with what comes from A and hands it on to C, all of it enqueued ahead. When A dies, B's watchdog lets B's streams go.
They compute rubbish and give it to C with a correct ``full``; C's streams wait for nobody who is dead.

Races are not looked for here (`LooseMachine`): streams that were let go by force are in no order with anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import Counter, HostBoard
from crossfade.errors import ChannelBroken
from crossfade.host.memory import Memory
from crossfade.runtime.alive import Alive
from crossfade.testing.fake import FakeDriver, FakeLink, Fault, Machine, Until
from crossfade.testing.fake.machine import Range
from tests.helpers.device_worlds import scratch

__all__ = ["ChainWorld", "Look"]

Program = Iterator[Until | None]
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
    """What A makes."""
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


class _Ring:
    """A ring between two processes that know each other already, and its records."""

    def __init__(self, machine: Machine, memory: Memory, here: FakeDriver, there: FakeDriver, num_slots: int) -> None:
        self.label = f"ring {here.process}{there.process}"
        self.ahead = FakeLink(machine, here.process, there.process)
        self.back = FakeLink(machine, there.process, here.process)
        self.push = here.create_stream(f"push {self.label}")
        boards = [HostBoard(driver, memory, num_signals(num_slots), self.label) for driver in (here, there)]
        self.sender = RingSender(here, boards[0], self.push, self.ahead.send, self.label)
        self.receiver = RingReceiver(
            there, Pool(there), boards[1], self.back.send, self.label, num_slots=num_slots, slot_bytes=SIZE_BYTES
        )
        self.sender.on_record(self.back.take())


@dataclass
class ChainWorld:
    """See the module.

    Attributes:
        look: what C does before it publishes.
        num_values: how many go along the chain.
        num_slots: of each ring.
        is_marked_first: B's watchdog breaks B's ends off before it lets B's streams go, and not after.
        is_relay_publishing: B gives its values to a host, looking only whether its ends are broken off; C does nothing.
    """

    look: Look = Look.CHECK
    num_values: int = 1
    num_slots: int = 1
    is_marked_first: bool = True
    is_relay_publishing: bool = False
    num_published: int = field(default=0, init=False)
    _death: _Death = field(default_factory=_Death, init=False)
    _memories: tuple[Memory, Memory] = field(default_factory=lambda: (scratch(4096), scratch(4096)), init=False)

    def close(self) -> None:
        self._death.close()

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        self._death.begin()
        a, b, c = (FakeDriver(machine, name, device) for device, name in enumerate("ABC"))
        first = _Ring(machine, self._memories[0], a, b, self.num_slots)
        second = _Ring(machine, self._memories[1], b, c, self.num_slots)
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
            driver.kernel(compute, f"make value {index}", writes=((source, made(index)),))
            ready = driver.create_event()
            driver.record_event(ready, compute)
            while not ring.sender.try_send(source, SIZE_BYTES, ready=ready):
                yield Until("a credit of B", lambda: ring.back.has_record() or self._death.has_come)
                if self._death.has_come:
                    return
                ring.sender.on_record(ring.back.take())
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
                lease = first.receiver.accept(record, compute)
                target = driver.allocate(SIZE_BYTES, f"relayed value {index}")
                where = Range(lease.address, SIZE_BYTES), Range(target, SIZE_BYTES)
                driver.function(compute, f"relay value {index}", relayed, reads=where[:1], writes=where[1:])
                lease.release()
                ready = driver.create_event()
                driver.record_event(ready, compute)
                made_here.append((ready, target))
                yield None
                while not second.sender.try_send(target, SIZE_BYTES, ready=ready):
                    yield Until("a credit of C", lambda: second.back.has_record() or told["B"])
                    if second.back.has_record():
                        second.sender.on_record(second.back.take())
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
            first.receiver.break_off("A died")
            second.sender.give_up("A died")

        def missing() -> list[Counter]:
            return [each for each in first.receiver.signals() if machine.word(each.address).value < each.awaited]

        yield Until("A's end", lambda: self._death.has_come)
        if self.is_marked_first:
            mark()
        while True:
            yield None
            for signal in first.receiver.signals():
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
            lease = ring.receiver.accept(record, compute)
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
    yield Until("the value", lambda: driver._events[event - 1].clock is not None)
    driver.has_happened(event)
    yield None
