"""GPUs with a clock and nothing else: streams run what is enqueued in a scripted time. For tests of what measures time.

All ranks live in one thread. A copy takes ``overhead_us`` and its bytes over the link's rate; copies that leave or reach one device
at the same time share its link; ``slow`` has the factors by which one kind of operation is slower beside another.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from crossfade.host.memory import Memory
from crossfade.testing.stand_in import StandIn

HOST = -1


@dataclass(frozen=True)
class Speeds:
    copy_gbs: float = 400.0
    host_gbs: float = 50.0
    nccl_gbs: float = 200.0
    overhead_us: float = 2.0
    memory_op_us: float = 3.0
    work_us: Mapping[str, float] = field(default_factory=lambda: {"gemm": 150.0, "memory": 100.0})
    slow: Mapping[tuple[str, str], float] = field(default_factory=dict)
    host_us: Mapping[str, float] = field(
        default_factory=lambda: {"copy": 4.0, "word": 1.5, "event": 0.5, "kernel": 5.0, "graph": 6.0}
    )


@dataclass
class Mark:
    time_us: float | None = None


@dataclass
class Op:
    kind: str
    duration_us: float = 0.0
    devices: tuple[int, ...] = ()
    waits: tuple[int, int] | None = None
    stores: tuple[int, int] | None = None
    records: Mark | None = None
    after: Mark | None = None
    enqueued_us: float = 0.0


@dataclass
class Stream:
    device: int
    label: str
    queue: deque[Op] = field(default_factory=deque)
    time_us: float = 0.0
    running: str = ""
    running_on: tuple[int, ...] = ()


class Clocked:
    def __init__(self, speeds: Speeds | None = None) -> None:
        self.speeds = speeds or Speeds()
        self.now_us = 0.0
        self.streams: list[Stream] = []
        self.words: dict[int, list[tuple[float, int]]] = {}
        self._mapped: dict[tuple[int, int], int] = {}

    def mapped(self, memory: Memory, offset: int = 0) -> int:
        key = (os.fstat(memory.fd).st_ino, offset)
        return self._mapped.setdefault(key, (1 << 60) + (len(self._mapped) << 40))

    def word(self, address: int) -> int:
        self.pump()
        return self.words.get(address, [(0.0, 0)])[-1][1]

    def store(self, address: int, value: int, time_us: float) -> None:
        self.words.setdefault(address, []).append((time_us, value))

    def _seen_us(self, address: int, value: int) -> float | None:
        """Since when the word is at least ``value``."""
        seen_us = 0.0 if value == 0 else None
        for time_us, stored in reversed(self.words.get(address, [])):
            if stored < value:
                break
            seen_us = time_us
        return seen_us

    def _ready_us(self, stream: Stream) -> float | None:
        op = stream.queue[0]
        ready_us = max(stream.time_us, op.enqueued_us)
        if op.waits is not None:
            address, value = op.waits
            seen_us = self._seen_us(address, value)
            if seen_us is None:
                return None
            ready_us = max(ready_us, seen_us)
        if op.after is not None:
            if op.after.time_us is None:
                return None
            ready_us = max(ready_us, op.after.time_us)
        return ready_us

    def pump(self) -> None:
        while True:
            ready = [
                (time_us, place)
                for place, stream in enumerate(self.streams)
                if stream.queue and (time_us := self._ready_us(stream)) is not None
            ]
            if not ready:
                return
            time_us, place = min(ready)
            self._run(self.streams[place], time_us)

    def _run(self, stream: Stream, start_us: float) -> None:
        op = stream.queue.popleft()
        stream.running, stream.running_on = op.kind, op.devices
        stream.time_us = start_us + op.duration_us * self._factor(stream, op, start_us)
        if op.stores is not None:
            self.store(*op.stores, stream.time_us)
        if op.records is not None:
            op.records.time_us = stream.time_us

    def _factor(self, stream: Stream, op: Op, start_us: float) -> float:
        beside: list[tuple[str, tuple[int, ...]]] = []
        for other in self.streams:
            if other is stream:
                continue
            if other.time_us > start_us and other.running:
                beside.append((other.running, other.running_on))
            elif queued := next((each for each in other.queue if each.duration_us and each.devices), None):
                beside.append((queued.kind, queued.devices))
        factor = 1.0
        for kind in {kind for kind, devices in beside if set(devices) & set(op.devices)}:
            factor *= self.speeds.slow.get((op.kind, kind), 1.0)
        if op.kind == "copy":
            leave = sum(kind == "copy" and devices[0] == op.devices[0] for kind, devices in beside)
            reach = sum(kind == "copy" and devices[-1] == op.devices[-1] for kind, devices in beside)
            factor *= 1 + max(leave, reach)
        return factor


class ClockedRange:
    def __init__(self, machine: Clocked, address: int, size_bytes: int) -> None:
        self._machine = machine
        self.address = address
        self.size_bytes = size_bytes

    def view(self) -> memoryview:
        raise NotImplementedError("the clocked machine's memory has words, and no bytes")

    def peek(self, offset: int) -> int:
        return self._machine.word(self.address + offset)

    def peeker(self, offset: int) -> Callable[[], int]:
        return partial(self.peek, offset)

    def poke(self, offset: int, value: int) -> None:
        self._machine.store(self.address + offset, value, self._machine.now_us)

    def close(self) -> None: ...


class ClockedDriver(StandIn):
    """`crossfade.device.driver.TimedDriver` on the machine. A batch of words takes as long as one."""

    def __init__(self, machine: Clocked, device: int) -> None:
        super().__init__(device)
        self.machine = machine
        self._next = (device + 1) << 44
        self.streams: dict[int, Stream] = {}
        self._marks: dict[int, Mark] = {}
        self._graphs: dict[int, list[Op]] = {}
        self._capture: list[Op] | None = None

    def allocate(self, size_bytes: int, label: str) -> int:
        address = self._next
        self._next += 1 << 36
        self.ledger.take_at("memory", address, label)
        return address

    def map_host(self, memory: Memory, offset: int, size_bytes: int, label: str) -> ClockedRange:
        return ClockedRange(self.machine, self.machine.mapped(memory, offset), size_bytes)

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        stream = super().create_stream(label)
        self.streams[stream] = Stream(self.device, label)
        self.machine.streams.append(self.streams[stream])
        return stream

    def create_event(self) -> int:
        event = super().create_event()
        self._marks[event] = Mark()
        return event

    create_timer = create_event

    def enqueue(self, stream: int, op: Op, host: str) -> None:
        self.machine.now_us += self.machine.speeds.host_us[host]
        if self._capture is not None:
            self._capture.append(op)
            return
        op.enqueued_us = self.machine.now_us
        self.streams[stream].queue.append(op)

    def _place(self, address: int) -> int:
        return HOST if address >> 60 else (address >> 44) - 1

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        speeds = self.machine.speeds
        ends = (self._place(source), self._place(target))
        kind = "up" if ends[1] == HOST else "down" if ends[0] == HOST else "copy"
        gbs = speeds.copy_gbs if kind == "copy" else speeds.host_gbs
        devices = tuple(end for end in ends if end != HOST)
        self.enqueue(stream, Op(kind, speeds.overhead_us + size_bytes / gbs / 1e3, devices), "copy")

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.enqueue(stream, Op("word", self.machine.speeds.memory_op_us, stores=(address, value)), "word")

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self.enqueue(stream, Op("word", waits=(address, value)), "word")

    def write_values(self, stream: int, addresses: Sequence[int], value: int) -> None:
        for number, address in enumerate(addresses):
            lasts_us = 0.0 if number else self.machine.speeds.memory_op_us
            self.enqueue(stream, Op("word", lasts_us, stores=(address, value)), "word")

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        for address in addresses:
            self.enqueue(stream, Op("word", waits=(address, value)), "word")
        for address in addresses:
            self.enqueue(stream, Op("word", stores=(address, reset)), "word")

    def record_event(self, event: int, stream: int) -> None:
        self._marks[event] = Mark()  # who waits for the event already waits for its last record, as with CUDA
        self.enqueue(stream, Op("event", records=self._marks[event]), "event")

    def wait_event(self, stream: int, event: int) -> None:
        self.enqueue(stream, Op("event", after=self._marks[event]), "event")

    def is_idle(self, stream: int) -> bool:
        self.machine.pump()
        made = self.streams[stream]
        if not made.queue:
            self.machine.now_us = max(self.machine.now_us, made.time_us)
        return not made.queue

    def wait_host(self, event: int) -> None:
        while not self.has_happened(event):
            continue

    def has_happened(self, event: int) -> bool:
        self.machine.pump()
        time_us = self._marks[event].time_us
        if time_us is not None:
            self.machine.now_us = max(self.machine.now_us, time_us)
        return time_us is not None

    def time_us(self, event: int) -> float:
        """When the event happened; 0 if it has not."""
        return self._marks[event].time_us or 0.0

    def elapsed_us(self, first: int, last: int) -> float:
        begin, end = self._marks[first].time_us, self._marks[last].time_us
        assert begin is not None
        assert end is not None
        return end - begin

    def is_capturing(self, stream: int) -> bool:
        return self._capture is not None

    def begin_capture(self, stream: int) -> None:
        self._capture = []

    def end_capture(self, stream: int) -> int:
        assert self._capture is not None
        graph = self._new("graph")
        self._graphs[graph], self._capture = self._capture, None
        return graph

    def launch(self, graph: int, stream: int) -> None:
        busy_us = sum(op.duration_us for op in self._graphs[graph])
        self.enqueue(stream, Op("graph", busy_us), "graph")
