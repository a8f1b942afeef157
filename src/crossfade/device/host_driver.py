"""The driver protocol on a CPU: memory that processes share, and calls that are done when they return.

A "stream" is the caller: each operation is done at once, in the calling thread. That is a legal order of what a GPU would do, as
long as whatever a stream waits for is enqueued before the wait (PL-5): rings and staged copies tell of it by a record, and
exchanges set their signals before they wait. So rings, staged copies and peers run between real processes where there is no GPU.
What it cannot show is a host that runs ahead of its device; the fake machine does.

A wait polls the word. The watchdog lets it go when the other process dies, a time limit when nothing else helps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from crossfade.device.driver import HOST
from crossfade.device.host_memory import HostMemories
from crossfade.device.ledger import Ledger
from crossfade.errors import ChannelTimeout, DeviceError
from crossfade.host.memory import Memory, address_of, align
from crossfade.host.semaphore import full_fence

_NUM_YIELDS = 50
_PAUSE_S = 0.0001
_HINT = "the other side has to enqueue what is waited for before the wait"
_MASK, _HALF = 0xFFFF_FFFF, 0x8000_0000


class SharedRange:
    """A part of shared memory, mapped into this process (see `crossfade.device.driver.HostRange`)."""

    def __init__(self, driver: HostDriver, memory: Memory, offset: int, size_bytes: int, label: str) -> None:
        self.size_bytes = align(size_bytes, mmap.PAGESIZE)
        self._mapping: mmap.mmap | None = memory.map(self.size_bytes, offset)
        self.address = address_of(self._mapping)
        self._ledger = driver.ledger
        self._number = driver.ledger.take("mapped", label)

    def peek(self, offset: int) -> int:
        return ctypes.c_uint32.from_address(self.address + offset).value

    def peeker(self, offset: int) -> Callable[[], int]:
        return partial(getattr, ctypes.c_uint32.from_address(self.address + offset), "value")

    def poke(self, offset: int, value: int) -> None:
        ctypes.c_uint32.from_address(self.address + offset).value = value

    def view(self) -> memoryview:
        if self._mapping is None:
            raise DeviceError("a range of shared memory is closed", hint="take its view before that")
        return memoryview(self._mapping)

    def close(self) -> None:
        self._mapping = None
        self._ledger.drop(self._number)


class HostDriver(HostMemories):
    """A CPU in the place of a device (see `TimedDriver`). A wait beyond ``timeout_s`` raises an error with ``hint``."""

    def __init__(self, timeout_s: float, hint: str = _HINT) -> None:
        super().__init__(HOST, Ledger())
        self._timeout_s = timeout_s
        self._hint = hint
        self._labels: dict[int, str] = {}
        self._times_ns: dict[int, int] = {}  # of timers, 0 before the first recording
        self._waiting: Counter[int] = Counter()
        self._numbers = count(1)
        self._graphs: dict[int, list[Callable[[], object]]] = {}
        self._capture = threading.local()
        self._fence = full_fence()

    # set-up

    def _new(self, kind: str, label: str = "") -> int:
        number = next(self._numbers)
        self.ledger.take_at(kind, number, label)
        return number

    def map_host(self, memory: Memory, offset: int, size_bytes: int, label: str) -> SharedRange:
        return SharedRange(self, memory, offset, size_bytes, label)

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        """Numbers of made streams are negative, those of threads are not."""
        return -self._new("stream", label)

    def destroy_stream(self, stream: int) -> None:
        self.ledger.drop_at("stream", -stream)

    def create_event(self) -> int:
        return self._new("event")

    def create_timer(self) -> int:
        timer = self._new("event")
        self._times_ns[timer] = 0
        return timer

    def create_host_event(self) -> int:
        return self.create_event()

    def destroy_event(self, event: int) -> None:
        self._times_ns.pop(event, None)
        self.ledger.drop_at("event", event)

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        """Words have one name; a buffer begins where none lies."""
        self._labels[address] = label

    # enqueue: done at once, or collected

    def do(self, action: Callable[[], object]) -> None:
        """Beyond the protocol: any action, in its place among the others."""
        collected: list[Callable[[], object]] | None = getattr(self._capture, "actions", None)
        if collected is None:
            action()
        else:
            collected.append(action)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.do(lambda: ctypes.memmove(target, source, size_bytes))

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.do(lambda: self._store(address, value))

    def _store(self, address: int, value: int) -> None:
        self._fence()
        ctypes.c_uint32.from_address(address).value = value
        self._fence()

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Raises a `ChannelTimeout` if nobody set it in time."""
        self.do(lambda: self._await(stream, address, value))

    def _await(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        if not self._has(word, value):
            self._waiting[stream] += 1
            try:
                self._poll(word, address, value)
            finally:
                self._waiting[stream] -= 1
        self._fence()

    @staticmethod
    def _has(word: ctypes.c_uint32, value: int) -> bool:
        return (word.value - value) & _MASK < _HALF

    def _poll(self, word: ctypes.c_uint32, address: int, value: int) -> None:
        for _ in range(_NUM_YIELDS):
            os.sched_yield()
            if self._has(word, value):
                return
        deadline = time.monotonic() + self._timeout_s
        while not self._has(word, value):
            if time.monotonic() > deadline:
                label = self._labels.get(address, f"the word at {address:#x}")
                raise ChannelTimeout(
                    f"nobody has set '{label}' in {self._timeout_s:g} s",
                    hint=self._hint,
                )
            time.sleep(_PAUSE_S)

    def wait_and_reset(self, stream: int, address: int, value: int, reset: int) -> None:
        self.wait_value(stream, address, value)
        self.write_value(stream, address, reset)

    def write_values(self, stream: int, addresses: Sequence[int], value: int) -> None:
        for address in addresses:
            self.write_value(stream, address, value)

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        for address in addresses:
            self.wait_and_reset(stream, address, value, reset)

    def record_event(self, event: int, stream: int) -> None:
        """What was enqueued has happened; a timer notes when."""
        if event in self._times_ns:
            self.do(lambda: self._note(event))

    def _note(self, timer: int) -> None:
        self._times_ns[timer] = time.monotonic_ns()

    def wait_event(self, stream: int, event: int) -> None:
        """Nothing: it has happened."""

    # look

    def is_idle(self, stream: int) -> bool:
        return not self._waiting[stream]

    def has_happened(self, event: int) -> bool:
        return True

    def elapsed_us(self, first: int, last: int) -> float:
        return (self._times_ns[last] - self._times_ns[first]) / 1e3

    # wait

    def failure(self) -> str:
        """What this device does fails at once, where it is asked for it."""
        return ""

    def wait_host(self, event: int) -> None:
        """Nothing: it has happened."""

    # capture

    def is_capturing(self, stream: int) -> bool:
        """So it is on all streams of this thread, or on none."""
        return getattr(self._capture, "actions", None) is not None

    def enter_thread(self) -> None:
        """See `Driver`."""

    def begin_capture(self, stream: int) -> None:
        """Collects what this thread enqueues on any stream."""
        self._capture.actions = []

    def end_capture(self, stream: int) -> int:
        graph = self._new("graph")
        self._graphs[graph] = self._capture.actions
        self._capture.actions = None
        return graph

    def launch(self, graph: int, stream: int) -> None:
        for action in self._graphs[graph]:
            self.do(action)

    def destroy_graph(self, graph: int) -> None:
        del self._graphs[graph]
        self.ledger.drop_at("graph", graph)
