"""The driver protocol on the fake machine, and the line on which two hosts exchange records."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from crossfade.device.driver import Allocation as Allocated
from crossfade.errors import DeviceError
from crossfade.host.memory import Memory
from crossfade.testing.fake.clocks import Allocation, Clock, is_before, join
from crossfade.testing.fake.graphs import Capture
from crossfade.testing.fake.machine import Fault, Machine, Mark, Operation, Range, Until
from crossfade.testing.stand_in import StandIn


class FakeDriver(StandIn):
    """One process's driver of one device of the machine (see `crossfade.device.driver.Driver`). Several drivers may share a
    process's name.

    The process's streams are spread over ``num_queues`` hardware queues; 1 makes all share one, None gives each its own.
    """

    def __init__(self, machine: Machine, process: str, device: int = 0, *, num_queues: int | None = None) -> None:
        super().__init__(device)
        self.machine = machine
        self.process = process
        self._num_queues = num_queues
        self._streams: dict[int, str] = {}
        self._events: dict[int, Mark] = {}
        self._graphs: dict[int, Capture] = {}
        self._capture: Capture | None = None
        machine.at_end.append(self._check_leases)

    def _check_leases(self) -> None:
        for held in self.ledger.held("lease"):
            name = held.removeprefix("lease: ")
            uses = self.machine.last_uses(name)
            by = "' and '".join(uses)
            raise Fault("leak", f"{self.process} has not ended its lease on {name}, last used by '{by}'", *uses)

    # set-up

    def allocate(self, size_bytes: int, label: str) -> int:
        address = self.machine.allocate(size_bytes, label, self.process).address
        self.ledger.take_at("memory", address, label)
        return address

    def free(self, address: int) -> None:
        self.machine.free(self._allocation(address), self.process)
        super().free(address)

    def _allocation(self, address: int) -> Allocation:
        return self.machine.find(Range(address, 0), self.process)[0]

    def allocation_of(self, address: int) -> Allocated | None:
        found = self._allocation(address)
        return Allocated(found.address, found.size_bytes, found.address)  # no address is given out twice

    def open_handle(self, handle: bytes, label: str) -> int:
        address = super().open_handle(handle, label)
        self._allocation(address).openers.append(self.process)
        return address

    def close_handle(self, address: int) -> None:
        allocation = self._allocation(address)
        clock = self.machine.line(self.process).clock
        for access in allocation.accesses:
            is_own = access.line.startswith(f"{self.process}/") and allocation.owner != self.process
            if is_own and not is_before(access, clock):
                act = f"{self.process} closes {allocation.label}"
                raise Fault("race", f"{act} and does not know that '{access.label}' has run", act, access.label)
        allocation.openers.remove(self.process)
        super().close_handle(address)

    def map_host(self, memory: Memory, offset: int, size_bytes: int, label: str) -> FakeHostRange:
        key = (os.fstat(memory.fd).st_ino, offset)
        return FakeHostRange(self, self._shared(key, size_bytes, label))

    def _shared(self, key: Any, size_bytes: int, label: str) -> Allocation:
        name = f"host memory {key}"
        for allocation in self.machine.allocations:
            if allocation.owner == name:
                return allocation
        made = self.machine.allocate(size_bytes, label, name, fill=0)
        self.machine.at_end.insert(
            0, lambda: setattr(made, "is_freed", True)
        )  # the mapping's end is the kernel's business
        return made

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        stream = super().create_stream(label)
        self._streams[stream] = f"{self.process}/{label}"
        return stream

    def create_event(self) -> int:
        event = super().create_event()
        self._events[event] = Mark({})
        return event

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        if size_bytes == 4:
            self.machine.word(address).label = label
            return
        allocation = self._allocation(address)
        start = address - allocation.address
        allocation.names.append((start, start + size_bytes, label))

    # enqueue

    def _host(self) -> Clock:
        line = self.machine.line(self.process)
        line.tick += 1
        line.clock[self.process] = line.tick
        return dict(line.clock)

    def _enqueue(self, stream: int, label: str, **rest: Any) -> None:
        name = self._streams[stream]
        operation = Operation(f"{label} on {name}", name, self._host(), **rest)
        if self._capture is not None and self._capture.take(stream, operation):
            return
        self._submit(stream, operation)

    def _submit(self, stream: int, operation: Operation) -> None:
        place = stream - 1 if self._num_queues is None else (stream - 1) % self._num_queues
        self.machine.enqueue(f"queue {place} of {self.process}", operation)

    def _name(self, address: int, size_bytes: int) -> str:
        allocation, start = self.machine.find(Range(address, size_bytes), self.process)
        return allocation.name(start, start + size_bytes)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        label = f"copy {self._name(source, size_bytes)} to {self._name(target, size_bytes)}"

        def move() -> None:
            self.machine.write_bytes(target, self.machine.read_bytes(Range(source, size_bytes), label), label)

        ranges = {"reads": (Range(source, size_bytes),), "writes": (Range(target, size_bytes),)}
        self._enqueue(stream, label, effect=move, **ranges)

    def kernel(
        self,
        stream: int,
        label: str,
        *,
        reads: tuple[Range, ...] = (),
        writes: tuple[tuple[int, bytes], ...] = (),
        seen: Any = None,
    ) -> None:
        """Enqueues a computation: reads ranges, then stores bytes. ``seen``, a list, gets what it read."""

        def compute() -> None:
            if seen is not None:
                seen.extend(self.machine.read_bytes(where, label) for where in reads)
            for address, data in writes:
                self.machine.write_bytes(address, data, label)

        written = tuple(Range(address, len(data)) for address, data in writes)
        self._enqueue(stream, label, reads=reads, writes=written, effect=compute)

    def function(
        self,
        stream: int,
        label: str,
        compute: Callable[..., bytes],
        *,
        reads: tuple[Range, ...],
        writes: tuple[Range, ...],
    ) -> None:
        """Enqueues a computation whose result depends on what it reads: ``compute`` gets the bytes of each range that is read, and
        what it returns is stored in each range that is written.
        """

        def effect() -> None:
            data = compute(*(self.machine.read_bytes(where, label) for where in reads))
            for where in writes:
                self.machine.write_bytes(where.address, data, label)

        self._enqueue(stream, label, reads=reads, writes=writes, effect=effect)

    def write_value(self, stream: int, address: int, value: int) -> None:
        word = self.machine.word(address)
        self._enqueue(stream, f"set {word.label} to {value}", word=word, stores=value)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        word = self.machine.word(address)
        self._enqueue(stream, f"wait for {word.label}", word=word, waits_for=value)

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        for address in addresses:
            word = self.machine.word(address)
            self._enqueue(stream, f"wait for {word.label}", word=word, waits_for=value)
            self._enqueue(stream, f"reset {word.label}", word=word, stores=reset)

    def record_event(self, event: int, stream: int) -> None:
        mark = self._events[event] = Mark(None, self._streams[stream])
        self._enqueue(stream, "record an event", records=mark)

    def wait_event(self, stream: int, event: int) -> None:
        mark = self._events[event]
        self._enqueue(stream, f"wait for an event of {mark.label}", after=mark)

    # look

    def until_idle(self, stream: int) -> Until:
        """For programs to yield: the stream has done all that it was given. (What the host then knows, `is_idle` tells it.)"""
        line = self.machine.line(self._streams[stream])
        return Until(f"{self._streams[stream]} to finish", lambda: line.num_pending == 0)

    def until_happened(self, event: int) -> Until:
        """For programs to yield: the event has happened. (What the host then knows, `has_happened` tells it.)"""
        return Until("an event", lambda: self._events[event].clock is not None)

    def is_idle(self, stream: int) -> bool:
        line = self.machine.line(self._streams[stream])
        is_idle = line.num_pending == 0
        self.machine.observe(self.process, ("idle", stream, is_idle))
        if is_idle:
            join(self.machine.line(self.process).clock, line.clock)
        return is_idle

    def has_happened(self, event: int) -> bool:
        clock = self._events[event].clock
        self.machine.observe(self.process, ("event", event, clock is not None))
        if clock is not None:
            join(self.machine.line(self.process).clock, clock)
        return clock is not None

    def wait_host(self, event: int) -> None:
        """A host of this machine waits by yielding; what has not happened cannot be waited for in here."""
        if not self.has_happened(event):
            raise DeviceError("a host of the fake machine cannot block", hint="yield an Until in the program")

    def peek(self, address: int) -> int:
        word = self.machine.word(address)
        self.machine.observe(self.process, ("peek", address, word.value))
        join(self.machine.line(self.process).clock, word.clock)
        return word.value

    def poke(self, address: int, value: int) -> None:
        word = self.machine.word(address)
        word.supplied = {value: 1} if value else {}  # a first value, or a release: what came before does not count
        self.machine.store(word, value, f"{self.process} stores {value}", self.process, self._host())

    # capture

    def is_capturing(self, stream: int) -> bool:
        return self._capture is not None and self._capture.has(stream)

    def begin_capture(self, stream: int) -> None:
        self._capture = Capture(stream, f"graph {len(self._graphs)} of {self.process}")

    def end_capture(self, stream: int) -> int:
        captured, self._capture = self._capture, None
        if captured is None:
            raise Fault("capture", f"{self.process} ends a capture that it has not begun")
        captured.end()
        graph = self._new("graph")
        self._graphs[graph] = captured
        return graph

    def launch(self, graph: int, stream: int) -> None:
        for own, operation in self._graphs[graph].launch(self._streams[stream], self._host()):
            self._submit(stream if own is None else own, operation)


class FakeHostRange:
    """Shared host memory of the machine (see `crossfade.device.driver.HostRange`)."""

    def __init__(self, driver: FakeDriver, allocation: Allocation) -> None:
        self._driver = driver
        self.address = allocation.address
        self.size_bytes = allocation.size_bytes
        self._number = driver.ledger.take("pinned", allocation.label)

    def peek(self, offset: int) -> int:
        return self._driver.peek(self.address + offset)

    def peeker(self, offset: int) -> Callable[[], int]:
        return partial(self.peek, offset)

    def poke(self, offset: int, value: int) -> None:
        self._driver.poke(self.address + offset, value)

    def view(self) -> memoryview:
        """What the machine holds are values with clocks, and no bytes that a host could look at."""
        raise DeviceError("memory of the fake machine has no view", hint="peek and poke")

    def close(self) -> None:
        self._driver.ledger.drop(self._number)


class FakeLink:
    """Records on their way from one host to another, in order; what the sender knew, the receiver knows after."""

    def __init__(self, machine: Machine, sender: str, receiver: str) -> None:
        self._machine = machine
        self._sender = sender
        self._receiver = receiver
        self._records: deque[tuple[Any, Clock]] = deque()

    def send(self, record: Any) -> None:
        """Puts a record in."""
        self._records.append((record, dict(self._machine.line(self._sender).clock)))

    def has_record(self) -> bool:
        """Whether one is there."""
        return bool(self._records)

    def take(self) -> Any:
        """The next record."""
        record, clock = self._records.popleft()
        join(self._machine.line(self._receiver).clock, clock)
        self._machine.observe(self._receiver, ("record", record))
        return record
