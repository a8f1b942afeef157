"""A ring between a sender and a receiver on the fake machine, signals and replays; and rings with a fault each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossfade.device.capture import capture
from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued, Finished, FreeEnqueued, Retired
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import Lease, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import HostBoard
from crossfade.testing.fake import FakeDriver, Machine, Until
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.worlds.kit import RingLine, check_seen, close_pool, content, finish, make, scratch, use


@dataclass
class RingWorld:
    """A ring and what is sent through it."""

    sizes_bytes: Sequence[int] = (16, 16, 16)  # lengths of the values
    num_slots: int = 2
    slot_bytes: int = 512
    num_kept: int = 0  # how many of the values that came last the receiver keeps
    num_queues: int | None = None  # hardware queues of each process
    is_one_process: bool = False  # both ends in one process, so that they share hardware queues
    sender: Callable[..., RingSender] = RingSender  # classes with or without a fault
    receiver: Callable[..., RingReceiver] = RingReceiver
    num_use_streams: int = 1  # streams that the receiver uses values on, in turn
    side: str = ""
    """What becomes of a side stream that uses each value as well: it ``rejoins`` before the lease ends, or nobody thinks of it
    (``forgotten``); empty for no such stream."""
    is_accepting_early: bool = False  # the receiver waits before it is told that it may
    is_source_reused: bool = False  # the sender computes the next value where the last one lies
    is_leaking: bool = False  # the receiver forgets the last value that it has, without ending its lease
    num_copied_out: int = field(default=0, init=False)
    num_generations: int = field(default=0, init=False)

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        names = ("both", "both") if self.is_one_process else ("sender", "receiver")
        there = FakeDriver(machine, names[1], 1, num_queues=self.num_queues)
        here = there if self.is_one_process else FakeDriver(machine, names[0], 0, num_queues=self.num_queues)
        line = RingLine(machine, here, there, "ring a", num_signals(self.num_slots))
        machine.at_end.append(line.memory.close)
        return {"sending host": self._send(here, line), "receiving host": self._receive(there, line)}

    def _send(self, driver: FakeDriver, line: RingLine) -> Program:
        compute, copies = driver.create_stream("compute"), driver.create_stream("copies")
        pool = Pool(driver)
        ring = self.sender(driver, line.board(driver), copies, line.ahead.send, line.label)
        source = 0
        for index, size_bytes in enumerate(self.sizes_bytes):
            if not source or not self.is_source_reused:
                source = pool.take(size_bytes, f"value {index}", "sender").address
            ready = make(driver, compute, f"value {index}", source, content(index, size_bytes))
            while not ring.try_send(source, size_bytes, ready=ready):
                yield Until("a credit of ring a", lambda: line.back.has_record() or can_retire(driver, ring))
                if line.back.has_record():
                    ring.on_record(line.back.take())
            yield None
        yield driver.until_idle(copies)
        ring.close()
        close_pool(pool, "sender")

    def _receive(self, driver: FakeDriver, line: RingLine) -> Program:
        uses = [driver.create_stream(f"use {i}") for i in range(self.num_use_streams)]
        side = driver.create_stream("side") if self.side else 0
        pool = Pool(driver)
        ring = line.receiver(driver, self.num_slots, self.slot_bytes, self.receiver, pool)
        kept: list[Lease] = []
        seen: list[list[bytes]] = [[] for _ in self.sizes_bytes]
        if self.is_accepting_early:
            ring.accept(Enqueued(0, 0, 16), uses[0])
        for index, size_bytes in enumerate(self.sizes_bytes):
            record = yield from self._next_value(driver, ring, line, index)
            stream = uses[index % len(uses)]
            lease = ring.accept(record, stream)
            use(driver, stream, f"value {index}", lease.address, size_bytes, seen[index])
            if self.side:
                self._use_aside(driver, lease, stream, side, index)
            kept.append(lease)
            if lease.is_short and self.num_kept:
                self.num_copied_out += 1
                kept.pop().release()
            while len(kept) > self.num_kept:
                kept.pop(0).release()
            yield None
        if self.is_leaking:
            yield from finish(driver, uses)
            return
        for lease in kept:
            lease.release()
        yield from self._give_back(driver, ring, line, [*uses, *([side] if side else [])])
        pool.close()
        for index, (got, size_bytes) in enumerate(zip(seen, self.sizes_bytes, strict=True)):
            check_seen(got, [content(index, size_bytes)], f"value {index}")

    def _use_aside(self, driver: FakeDriver, lease: Lease, stream: int, side: int, index: int) -> None:
        """A method that uses a value on a stream of its own too."""
        self._follow(driver, side, stream)
        driver.kernel(side, f"use value {index} aside", reads=(Range(lease.address, lease.size_bytes),))
        if self.side == "rejoins":
            self._follow(driver, stream, side)

    @staticmethod
    def _follow(driver: FakeDriver, later: int, earlier: int) -> None:
        event = driver.create_event()
        driver.record_event(event, earlier)
        driver.wait_event(later, event)
        driver.destroy_event(event)

    def _next_value(
        self, driver: FakeDriver, ring: RingReceiver, line: RingLine, index: int
    ) -> Generator[Until | None, None, Enqueued]:
        ahead = line.ahead
        while True:
            yield Until(f"value {index}", lambda: ahead.has_record() or can_collect(driver, ring))
            record = ahead.take() if ahead.has_record() else None
            if isinstance(record, Enqueued):
                return record
            if record is None:
                ring.collect()
            else:
                ring.on_record(record)

    def _give_back(self, driver: FakeDriver, ring: RingReceiver, line: RingLine, uses: Sequence[int]) -> Program:
        ring.close()
        ahead = line.ahead
        while not ring.is_empty:
            if ahead.has_record():
                record = ahead.take()
                assert isinstance(record, Retired | Finished)
                ring.on_record(record)
            else:
                yield Until("the sender to close its side", lambda: ahead.has_record() or has_closed(ring))
            for stream in uses:
                yield driver.until_idle(stream)
            ring.collect()
        yield from finish(driver, uses)
        self.num_generations = ring.statistics().num_generations


@dataclass
class TwoWaitsWorld:
    """Two streams that wait for one signal, once each, which is set twice by turns: the second may take what the first takes."""

    is_counter: bool = False  # by a counter, which needs no order

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        driver = FakeDriver(machine, "process")
        sets, first, second = (driver.create_stream(name) for name in ("sets", "first", "second"))
        board = HostBoard(driver, scratch(), 3, "test")
        signal, answer, counter = (
            board.signal(0, "a signal"),
            board.signal(1, "an answer"),
            board.counter(2, "a counter"),
        )

        def host() -> Program:
            for number, stream in enumerate((first, second), start=1):
                counter.set(sets, number) if self.is_counter else signal.set(sets)
                counter.wait(stream, number) if self.is_counter else signal.wait(stream)
                answer.set(stream)
                answer.wait(sets)
                yield None

        return {"host": host()}


@dataclass
class ReplayWorld:
    """A captured copy with its signals, launched several times."""

    num_replays: int = 3  # launches
    is_counting: bool = False  # waits for 1, 2, 3, ... as an uncaptured program would, which a replay cannot.

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        driver = FakeDriver(machine, "process")
        return {"host": self._run(driver)}

    def _run(self, driver: FakeDriver) -> Program:
        main, side = driver.create_stream("main"), driver.create_stream("side")
        pool = Pool(driver)
        source, target = pool.take(16, "source", "test"), pool.take(16, "target", "test")
        memory = scratch()
        board = HostBoard(driver, memory, 2, "test")
        full = board.signal(0, "full")
        seen: list[bytes] = []

        def body() -> None:
            driver.copy(target.address, source.address, 16, side)
            if self.is_counting:
                driver.write_value(side, full.address, 1)
                driver.wait_value(main, full.address, 1)
            else:
                full.set(side)
                full.wait(main)
            use(driver, main, "the target", target.address, 16, seen)

        driver.kernel(main, "make the source", writes=((source.address, content(0, 16)),))
        replay = capture(driver, main, body, [side])
        for _ in range(self.num_replays):
            replay.launch(main)
            yield None
        yield from finish(driver, (main, side))
        replay.close()
        memory.close()
        for block in (source, target):
            block.release()
        pool.close()
        check_seen(seen, [content(0, 16)] * self.num_replays, "the value of a replay")


def can_retire(driver: FakeDriver, ring: RingSender) -> bool:
    """Whether the device has come so far that the sender can close earlier slots."""
    return ring.is_growing and driver.until_happened(ring._closing[0][1]).condition()


def can_collect(driver: FakeDriver, ring: RingReceiver) -> bool:
    """Whether the device has come so far that the receiver can offer what it was asked for."""
    word = driver.machine.word
    return ring.is_growing and any(
        slots.num_sent == sum(slots.num_uses)
        and not slots.leased
        and all(word(free.address).value >= number for free, number in zip(slots.free, slots.num_uses, strict=True))
        for slots in ring._generations.values()
    )


def has_closed(ring: RingReceiver) -> bool:
    """Whether nothing is missing but to collect."""
    return all(slots.num_sent is not None and not slots.leased for slots in ring._generations.values())


# faults


class FlagBeforeData(RingSender):
    is_flag_first = True

    def _enqueue(self, target: Any, slot: int, parts: Sequence[tuple[int, int, int]], ready: int | None) -> int:
        ((_, address, size_bytes),) = parts
        number: int = target.num_uses[slot] + 1
        target.num_uses[slot] = number
        self._driver.wait_event(self._stream, ready or 0)
        if self.is_flag_first:
            target.free[slot].wait(self._stream, number - 1)
            target.full[slot].set(self._stream, number)
        self._driver.copy(target.memory.address + slot * target.offer.slot_bytes, address, size_bytes, self._stream)
        if not self.is_flag_first:
            target.full[slot].set(self._stream, number)
        return number


class ReuseBeforeFree(FlagBeforeData):
    is_flag_first = False


class UncomputedSource(RingSender):
    def _enqueue(self, target: Any, slot: int, parts: Sequence[tuple[int, int, int]], ready: int | None) -> int:
        return super()._enqueue(target, slot, parts, None)


class MissingFree(RingReceiver):
    """Gives the credit back, and enqueues no ``free``."""

    def end_lease(self, lease: Lease) -> None:
        self._generations[lease.generation].leased.remove(lease.slot)
        self.driver.ledger.drop(lease.number)
        self._tell(FreeEnqueued(lease.generation, lease.slot))


class MissingCredit(RingReceiver):
    """Enqueues ``free``, and tells nobody."""

    def end_lease(self, lease: Lease) -> None:
        tell, self._tell = self._tell, lambda record: None
        super().end_lease(lease)
        self._tell = tell
