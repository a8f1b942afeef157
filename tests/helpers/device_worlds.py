"""Small worlds for the fake machine: one ring between a sender and a receiver, with places to plant faults in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from crossfade.device.fake import FakeDriver, FakeLink, Fault, Machine, Until
from crossfade.device.fake.machine import Range
from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued, FreeEnqueued, Retired
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import Lease, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import HostBoard
from crossfade.host.memory import Memory

Program = Iterator[Until | None]


def content(index: int, size_bytes: int) -> bytes:
    return bytes([index + 1]) * size_bytes


@dataclass
class RingWorld:
    """A ring and what is sent through it.

    Attributes:
        sizes_bytes: lengths of the values.
        num_kept: how many of the values that came last the receiver keeps.
        num_queues: hardware queues of each process.
        is_one_process: both ends in one process, so that they share hardware queues.
        sender, receiver: classes with or without a fault.
    """

    sizes_bytes: Sequence[int] = (16, 16, 16)
    num_slots: int = 2
    slot_bytes: int = 512
    num_kept: int = 0
    num_queues: int | None = None
    is_one_process: bool = False
    sender: Callable[..., RingSender] = RingSender
    receiver: Callable[..., RingReceiver] = RingReceiver
    is_accepting_early: bool = False
    is_source_reused: bool = False
    num_copied_out: int = field(default=0, init=False)
    num_generations: int = field(default=0, init=False)

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        names = ("both", "both") if self.is_one_process else ("sender", "receiver")
        there = FakeDriver(machine, names[1], 1, num_queues=self.num_queues)
        here = there if self.is_one_process else FakeDriver(machine, names[0], 0, num_queues=self.num_queues)
        memory = Memory.create("signals", 4096)
        ahead, back = FakeLink(machine, *names), FakeLink(machine, *reversed(names))
        programs = {
            "sending host": self._send(here, memory, ahead, back),
            "receiving host": self._receive(there, memory, ahead, back),
        }
        machine.at_end.append(memory.close)
        return programs

    def _send(self, driver: FakeDriver, memory: Memory, ahead: FakeLink, back: FakeLink) -> Program:
        compute, copies = driver.create_stream("compute"), driver.create_stream("copies")
        pool = Pool(driver)
        board = HostBoard(driver, memory, num_signals(self.num_slots), "ring a")
        ring = self.sender(driver, board, copies, ahead.send, "ring a")
        source = 0
        for index, size_bytes in enumerate(self.sizes_bytes):
            if not source or not self.is_source_reused:
                source = pool.take(size_bytes, f"value {index}", "sender").address
            ready = driver.create_event()
            driver.kernel(compute, f"make value {index}", writes=((source, content(index, size_bytes)),))
            driver.record_event(ready, compute)
            while not ring.try_send(source, size_bytes, ready=ready):
                yield Until("a credit of ring a", back.has_record)
                ring.on_record(back.take())
            yield None
        yield driver.until_idle(copies)
        ring.close()
        for block in list(pool._used):
            block.drop("sender")
        pool.close()

    def _receive(self, driver: FakeDriver, memory: Memory, ahead: FakeLink, back: FakeLink) -> Program:
        compute = driver.create_stream("use")
        pool = Pool(driver)
        board = HostBoard(driver, memory, num_signals(self.num_slots), "ring a")
        ring = self.receiver(
            driver, pool, board, back.send, "ring a", num_slots=self.num_slots, slot_bytes=self.slot_bytes
        )
        kept: list[Lease] = []
        seen: list[bytes] = []
        if self.is_accepting_early:
            ring.accept(Enqueued(0, 0, 16), compute)
        for index, size_bytes in enumerate(self.sizes_bytes):
            yield Until(f"value {index}", ahead.has_record)
            while not isinstance(record := ahead.take(), Enqueued):
                ring.on_record(record)
                yield Until(f"value {index}", ahead.has_record)
            is_short = ring.is_short
            lease = ring.accept(record, compute)
            driver.kernel(compute, f"use value {index}", reads=(Range(lease.address, size_bytes),), seen=seen)
            kept.append(lease)
            if is_short and self.num_kept:
                self.num_copied_out += 1
                kept.pop().release()
            while len(kept) > self.num_kept:
                kept.pop(0).release()
            yield None
        for lease in kept:
            lease.release()
        ring.close()
        while not ring.is_empty:
            if ahead.has_record():
                record = ahead.take()
                assert isinstance(record, Retired)
                ring.on_record(record)
            else:
                yield Until("the sender to close its side", lambda: ahead.has_record() or has_closed(ring))
            yield driver.until_idle(compute)
            ring.collect()
        yield driver.until_idle(compute)
        driver.is_idle(compute)
        self.num_generations = ring.statistics().num_generations
        pool.close()
        for index, (got, size_bytes) in enumerate(zip(seen, self.sizes_bytes, strict=True)):
            if got != content(index, size_bytes):
                raise Fault("wrong value", f"value {index} came as {got[:4]!r}")


def has_closed(ring: RingReceiver) -> bool:
    """Whether nothing is missing but to collect."""
    return all(slots.is_closed_by_sender and not slots.leases for slots in ring._generations.values())


class FlagBeforeData(RingSender):
    def _enqueue(self, target, slot, address, size_bytes, ready):  # type: ignore[no-untyped-def]
        self._driver.wait_event(self._stream, ready)
        target.free[slot].wait(self._stream)
        target.full[slot].set(self._stream)
        self._driver.copy(target.memory.address + slot * target.offer.slot_bytes, address, size_bytes, self._stream)


class ReuseBeforeFree(RingSender):
    def _enqueue(self, target, slot, address, size_bytes, ready):  # type: ignore[no-untyped-def]
        self._driver.wait_event(self._stream, ready)
        self._driver.copy(target.memory.address + slot * target.offer.slot_bytes, address, size_bytes, self._stream)
        target.full[slot].set(self._stream)


class UncomputedSource(RingSender):
    def _enqueue(self, target, slot, address, size_bytes, ready):  # type: ignore[no-untyped-def]
        super()._enqueue(target, slot, address, size_bytes, None)


class MissingFree(RingReceiver):
    """Gives the credit back, and enqueues no ``free``."""

    def _end(self, lease, streams):  # type: ignore[no-untyped-def]
        del self._generations[lease.generation].leases[lease.slot]
        self.driver.ledger.drop(lease._number)
        self._tell(FreeEnqueued(lease.generation, lease.slot))


class MissingCredit(RingReceiver):
    """Enqueues ``free``, and tells nobody."""

    def _end(self, lease, streams):  # type: ignore[no-untyped-def]
        tell, self._tell = self._tell, lambda record: None
        super()._end(lease, streams)
        self._tell = tell


class LeakedLease(RingReceiver):
    """Forgets one lease; its slots count as given back."""

    def _end(self, lease, streams):  # type: ignore[no-untyped-def]
        number, lease._number = lease._number, -1
        super()._end(lease, streams)
        lease._number = number
