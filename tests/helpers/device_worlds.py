"""Small worlds for the fake machine: one ring between a sender and a receiver, with places to plant faults in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from crossfade.device.capture import capture
from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued, Finished, Retired
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import Lease, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import HostBoard
from crossfade.device.staged import StagedReceiver, StagedSender, StagedStreams
from crossfade.device.staged_layout import Cut, StagedLayout
from crossfade.host.memory import Memory
from crossfade.testing.fake import FakeDriver, FakeLink, Fault, Machine, Until
from crossfade.testing.fake.clocks import join
from crossfade.testing.fake.machine import Range

Program = Iterator[Until | None]


def content(index: int, size_bytes: int) -> bytes:
    return bytes([index + 1]) * size_bytes


class Scratch(Memory):
    """Shared memory of one run, which may end anywhere."""

    def __del__(self) -> None:
        self.close()


def scratch(size_bytes: int) -> Memory:
    """New memory for a run."""
    return Scratch.create("scratch", size_bytes)


@dataclass
class RingWorld:
    """A ring and what is sent through it.

    Attributes:
        sizes_bytes: lengths of the values.
        num_kept: how many of the values that came last the receiver keeps.
        num_queues: hardware queues of each process.
        is_one_process: both ends in one process, so that they share hardware queues.
        sender, receiver: classes with or without a fault.
        num_use_streams: streams that the receiver uses values on, in turn.
        side: what becomes of a side stream that uses each value as well: it ``rejoins`` before the lease ends, the lease is told of
            it (``use_on``), or nobody thinks of it (``forgotten``); empty for no such stream.
        is_accepting_early: the receiver waits before it is told that it may.
        is_source_reused: the sender computes the next value where the last one lies.
        chunk_bytes: longest single copy.
        is_leaking: the receiver forgets the last value that it has, without ending its lease.
    """

    sizes_bytes: Sequence[int] = (16, 16, 16)
    num_slots: int = 2
    slot_bytes: int = 512
    num_kept: int = 0
    num_queues: int | None = None
    is_one_process: bool = False
    sender: Callable[..., RingSender] = RingSender
    receiver: Callable[..., RingReceiver] = RingReceiver
    num_use_streams: int = 1
    side: str = ""
    is_accepting_early: bool = False
    is_source_reused: bool = False
    is_leaking: bool = False
    chunk_bytes: int | None = None
    num_copied_out: int = field(default=0, init=False)
    num_generations: int = field(default=0, init=False)

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        names = ("both", "both") if self.is_one_process else ("sender", "receiver")
        there = FakeDriver(machine, names[1], 1, num_queues=self.num_queues)
        here = there if self.is_one_process else FakeDriver(machine, names[0], 0, num_queues=self.num_queues)
        memory = scratch(4096)
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
        ring = self.sender(driver, board, copies, ahead.send, "ring a", self.chunk_bytes)
        source = 0
        for index, size_bytes in enumerate(self.sizes_bytes):
            if not source or not self.is_source_reused:
                source = pool.take(size_bytes, f"value {index}", "sender").address
            ready = driver.create_event()
            driver.kernel(compute, f"make value {index}", writes=((source, content(index, size_bytes)),))
            driver.record_event(ready, compute)
            while not ring.try_send(source, size_bytes, ready=ready):
                yield Until("a credit of ring a", lambda: back.has_record() or can_retire(driver, ring))
                if back.has_record():
                    ring.on_record(back.take())
            yield None
        yield driver.until_idle(copies)
        ring.close()
        for block in list(pool._used):
            block.drop("sender")
        pool.close()

    def _receive(self, driver: FakeDriver, memory: Memory, ahead: FakeLink, back: FakeLink) -> Program:
        uses = [driver.create_stream(f"use {i}") for i in range(self.num_use_streams)]
        side = driver.create_stream("side") if self.side else 0
        pool = Pool(driver)
        board = HostBoard(driver, memory, num_signals(self.num_slots), "ring a")
        ring = self.receiver(
            driver, pool, board, back.send, "ring a", num_slots=self.num_slots, slot_bytes=self.slot_bytes
        )
        kept: list[Lease] = []
        seen: list[list[bytes]] = [[] for _ in self.sizes_bytes]
        if self.is_accepting_early:
            ring.accept(Enqueued(0, 0, 16), uses[0])
        for index, size_bytes in enumerate(self.sizes_bytes):
            record = yield from self._next_value(driver, ring, ahead, index)
            stream = uses[index % len(uses)]
            lease = ring.accept(record, stream)
            driver.kernel(stream, f"use value {index}", reads=(Range(lease.address, size_bytes),), seen=seen[index])
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
        yield from self._give_back(driver, ring, ahead, [*uses, *([side] if side else [])])
        pool.close()
        for index, (got, size_bytes) in enumerate(zip(seen, self.sizes_bytes, strict=True)):
            if got != [content(index, size_bytes)]:
                raise Fault("wrong value", f"value {index} came as {got[0][:4]!r}")

    def _use_aside(self, driver: FakeDriver, lease: Lease, stream: int, side: int, index: int) -> None:
        """A method that uses a value on a stream of its own too."""
        self._follow(driver, side, stream)
        driver.kernel(side, f"use value {index} aside", reads=(Range(lease.address, lease.size_bytes),))
        match self.side:
            case "rejoins":
                self._follow(driver, stream, side)
            case "use_on":
                lease.use_on(side)

    @staticmethod
    def _follow(driver: FakeDriver, later: int, earlier: int) -> None:
        event = driver.create_event()
        driver.record_event(event, earlier)
        driver.wait_event(later, event)
        driver.destroy_event(event)

    def _next_value(
        self, driver: FakeDriver, ring: RingReceiver, ahead: FakeLink, index: int
    ) -> Generator[Until | None, None, Enqueued]:
        while True:
            yield Until(f"value {index}", lambda: ahead.has_record() or can_collect(driver, ring))
            record = ahead.take() if ahead.has_record() else None
            if isinstance(record, Enqueued):
                return record
            if record is None:
                ring.collect()
            else:
                ring.on_record(record)

    def _give_back(self, driver: FakeDriver, ring: RingReceiver, ahead: FakeLink, uses: Sequence[int]) -> Program:
        ring.close()
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


def staged_streams(driver: FakeDriver, label: str, num_streams: int) -> StagedStreams:
    """One for all, or three."""
    made = [driver.create_stream(f"{label} {i}") for i in range(num_streams)]
    return StagedStreams(*(made * 3)[:3])


@dataclass
class StagedWorld:
    """Values through the host's memory, chunk by chunk.

    Attributes:
        sizes_bytes: their lengths.
        num_streams: of each side.
        cut, chunks_per_free: see `StagedLayout`.
        sender, receiver: classes with or without a fault.
    """

    sizes_bytes: Sequence[int] = (10_000, 3, 0, 4096)
    num_chunks: int = 2
    num_streams: int = 3
    cut: Cut = Cut.FULL
    chunks_per_free: int | None = None
    num_queues: int | None = None
    sender: Callable[..., StagedSender] = StagedSender
    receiver: Callable[..., StagedReceiver] = StagedReceiver

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        layout = StagedLayout(self.num_chunks, 4096, self.cut, self.chunks_per_free)
        memory = scratch(layout.size_bytes)
        machine.at_end.append(memory.close)
        here = FakeDriver(machine, "sender", 0, num_queues=self.num_queues)
        there = FakeDriver(machine, "receiver", 1, num_queues=self.num_queues)
        ahead, back = FakeLink(machine, "sender", "receiver"), FakeLink(machine, "receiver", "sender")
        up = staged_streams(here, "up", self.num_streams)
        down = staged_streams(there, "down", self.num_streams)
        sender = self.sender(here, memory, layout, up, ahead.send, "staged")
        receiver = self.receiver(there, memory, layout, down, back.send, "staged")
        # Both ends exist before the first value moves; the hosts agree on that when they connect.
        join(machine.line("receiver").clock, machine.line("sender").clock)
        return {
            "sending host": self._send(here, sender, up, back),
            "receiving host": self._receive(there, receiver, down, ahead),
        }

    def _send(self, driver: FakeDriver, ring: StagedSender, streams: StagedStreams, back: FakeLink) -> Program:
        compute = driver.create_stream("compute")
        pool = Pool(driver)
        for index, size_bytes in enumerate(self.sizes_bytes):
            source = pool.take(size_bytes, f"value {index}", "sender").address
            ready = driver.create_event()
            driver.kernel(compute, f"make value {index}", writes=((source, content(index, size_bytes)),))
            driver.record_event(ready, compute)
            cut = size_bytes // 3  # in two places, as several tensors of one value are
            ring.send_parts([(0, source, cut), (cut, source + cut, size_bytes - cut)], ready=ready)
            yield None
        while not ring.is_flushed:
            yield Until("a free chunk", back.has_record)
            ring.on_record(back.take())
        yield from finish(driver, streams)
        ring.close()
        for block in list(pool._used):
            block.drop("sender")
        pool.close()

    def _receive(self, driver: FakeDriver, ring: StagedReceiver, streams: StagedStreams, ahead: FakeLink) -> Program:
        compute = driver.create_stream("use")
        pool = Pool(driver)
        seen: list[bytes] = []
        for index, size_bytes in enumerate(self.sizes_bytes):
            target = pool.take(size_bytes, f"place {index}", "receiver").address
            while ring.next_bytes is None:
                yield Until(f"value {index}", ahead.has_record)
                ring.on_record(ahead.take())
            ring.receive(target)
            while not ring.is_enqueued:
                yield Until(f"all of value {index}", ahead.has_record)
                ring.on_record(ahead.take())
            ring.join(compute)
            driver.kernel(compute, f"use value {index}", reads=(Range(target, size_bytes),), seen=seen)
            yield None
        yield from finish(driver, [*streams, compute])
        ring.close()
        for block in list(pool._used):
            block.drop("receiver")
        pool.close()
        if seen != [content(index, size_bytes) for index, size_bytes in enumerate(self.sizes_bytes)]:
            raise Fault("wrong value", "a staged value came wrong")


def finish(driver: FakeDriver, streams: Sequence[int]) -> Program:
    """Waits for streams, and looks, so that the host knows what they did."""
    for stream in streams:
        yield driver.until_idle(stream)
        driver.is_idle(stream)


@dataclass
class TwoWaitsWorld:
    """Two streams that wait for one signal, once each, which is set twice by turns: the second may take what the first takes.

    Attributes:
        is_counter: by a counter, which needs no order.
    """

    is_counter: bool = False

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        driver = FakeDriver(machine, "process")
        sets, first, second = (driver.create_stream(name) for name in ("sets", "first", "second"))
        board = HostBoard(driver, scratch(4096), 3, "test")
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
    """A captured copy with its signals, launched several times.

    Attributes:
        is_counting: waits for 1, 2, 3, ... as an uncaptured program would, which a replay cannot.
        num_replays: launches.
    """

    num_replays: int = 3
    is_counting: bool = False

    def __call__(self, machine: Machine) -> Mapping[str, Program]:
        driver = FakeDriver(machine, "process")
        return {"host": self._run(driver)}

    def _run(self, driver: FakeDriver) -> Program:
        main, side = driver.create_stream("main"), driver.create_stream("side")
        pool = Pool(driver)
        source, target = pool.take(16, "source", "test"), pool.take(16, "target", "test")
        memory = scratch(4096)
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
            driver.kernel(main, "use the target", reads=(Range(target.address, 16),), seen=seen)

        driver.kernel(main, "make the source", writes=((source.address, content(0, 16)),))
        replay = capture(driver, main, body, [side])
        for _ in range(self.num_replays):
            replay.launch(main)
            yield None
        yield from finish(driver, (main, side))
        replay.close()
        memory.close()
        for block in (source, target):
            block.drop("test")
        pool.close()
        if seen != [content(0, 16)] * self.num_replays:
            raise Fault("wrong value", "a replay showed a stale value")


def can_retire(driver: FakeDriver, ring: RingSender) -> bool:
    """Whether the device has come so far that the sender can close earlier slots."""
    return ring.is_growing and driver._events[ring._closing[0][1] - 1].clock is not None


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
