"""The driver protocol for CPU groups: memory that processes share, and calls that are done when they return.

A "stream" is whoever calls: each operation is done at once, in the calling thread. That is a legal order of what a GPU would do, as
long as every host sets its signals before it waits, which exchanges do. A wait polls the word; the watchdog lets it go when the
other rank dies, a time limit when nothing else helps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from crossfade.device.ledger import Ledger
from crossfade.errors import ChannelTimeout, DeviceError
from crossfade.host.memory import Memory, address_of, align
from crossfade.host.semaphore import full_fence

__all__ = ["HostDriver", "SharedRange"]

_NUM_YIELDS = 50
_PAUSE_S = 0.0001
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
        """See `HostRange`."""
        return ctypes.c_uint32.from_address(self.address + offset).value

    def poke(self, offset: int, value: int) -> None:
        """See `HostRange`."""
        ctypes.c_uint32.from_address(self.address + offset).value = value

    def close(self) -> None:
        """See `HostRange`."""
        self._mapping = None
        self._ledger.drop(self._number)


class HostDriver:
    """A CPU in the place of a device (see `crossfade.device.driver.Driver`).

    Args:
        timeout_s: the longest that a wait may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.device = -1
        self.ledger = Ledger()
        self._timeout_s = timeout_s
        self._labels: dict[int, str] = {}
        self._waiting: Counter[int] = Counter()
        self._numbers = count(1)
        self._taken: dict[int, tuple[int, mmap.mmap | None]] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._capture = threading.local()
        self._fence = full_fence()

    # set-up

    def _take(self, kind: str, label: str, mapping: mmap.mmap | None = None, key: int | None = None) -> int:
        key = next(self._numbers) if key is None else key
        self._taken[key] = (self.ledger.take(kind, label), mapping)
        return key

    def _drop(self, key: int) -> None:
        self.ledger.drop(self._taken.pop(key)[0])

    def allocate(self, size_bytes: int, label: str) -> int:
        """See `Driver`."""
        mapping = mmap.mmap(-1, size_bytes)
        return self._take("memory", label, mapping, address_of(mapping))

    def free(self, address: int) -> None:
        """See `Driver`."""
        self._drop(address)

    def export(self, address: int) -> bytes:
        """See `Driver`.

        Raises:
            DeviceError: always; on a CPU, shared memory is shared from the start.
        """
        raise DeviceError("memory of a CPU is not exported", hint="map shared memory with map_host")

    def open_handle(self, handle: bytes, label: str) -> int:
        """See `export`."""
        raise DeviceError("memory of a CPU is not opened", hint="map shared memory with map_host")

    def close_handle(self, address: int) -> None:
        """See `export`."""
        raise DeviceError("memory of a CPU is not opened", hint="map shared memory with map_host")

    def map_host(self, memory: Memory, offset: int, size_bytes: int, label: str) -> SharedRange:
        """See `Driver`."""
        return SharedRange(self, memory, offset, size_bytes, label)

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        """See `Driver`. Numbers of made streams are negative, those of threads are not."""
        return -self._take("stream", label)

    def destroy_stream(self, stream: int) -> None:
        """See `Driver`."""
        self._drop(-stream)

    def create_event(self) -> int:
        """See `Driver`."""
        return self._take("event", "")

    def destroy_event(self, event: int) -> None:
        """See `Driver`."""
        self._drop(event)

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        """See `Driver`. Words have one name; a buffer begins where none lies."""
        self._labels[address] = label

    # enqueue: done at once, or collected

    def do(self, action: Callable[[], None]) -> None:
        """Beyond the protocol: any action, in its place among the others."""
        collected: list[Callable[[], None]] | None = getattr(self._capture, "actions", None)
        if collected is None:
            action()
        else:
            collected.append(action)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """See `Driver`."""
        self.do(lambda: _move(target, source, size_bytes))

    def write_value(self, stream: int, address: int, value: int) -> None:
        """See `Driver`."""
        self.do(lambda: self._store(address, value))

    def _store(self, address: int, value: int) -> None:
        self._fence()
        ctypes.c_uint32.from_address(address).value = value
        self._fence()

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """See `Driver`.

        Raises:
            ChannelTimeout: nobody set it in time.
        """
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
                    hint="all ranks must call the collectives of a lane in the same order, with the same lengths",
                )
            time.sleep(_PAUSE_S)

    def wait_and_reset(self, stream: int, address: int, value: int, reset: int) -> None:
        """See `Driver`."""
        self.wait_value(stream, address, value)
        self.write_value(stream, address, reset)

    def write_values(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """See `Driver`."""
        for address in addresses:
            self.write_value(stream, address, value)

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        """See `Driver`."""
        for address in addresses:
            self.wait_and_reset(stream, address, value, reset)

    def record_event(self, event: int, stream: int) -> None:
        """Nothing: what was enqueued has happened."""

    def wait_event(self, stream: int, event: int) -> None:
        """Nothing: it has happened."""

    # look

    def is_idle(self, stream: int) -> bool:
        """See `Driver`."""
        return not self._waiting[stream]

    def has_happened(self, event: int) -> bool:
        """See `Driver`."""
        return True

    def peek(self, address: int) -> int:
        """See `Driver`."""
        return ctypes.c_uint32.from_address(address).value

    def poke(self, address: int, value: int) -> None:
        """See `Driver`."""
        ctypes.c_uint32.from_address(address).value = value

    # capture

    def is_capturing(self) -> bool:
        """Whether this thread's calls are collected."""
        return getattr(self._capture, "actions", None) is not None

    def begin_capture(self, stream: int) -> None:
        """See `Driver`. Collects what this thread enqueues on any stream."""
        self._capture.actions = []

    def end_capture(self, stream: int) -> int:
        """See `Driver`."""
        graph = self._take("graph", "")
        self._graphs[graph] = self._capture.actions
        self._capture.actions = None
        return graph

    def launch(self, graph: int, stream: int) -> None:
        """See `Driver`."""
        for action in self._graphs[graph]:
            self.do(action)

    def destroy_graph(self, graph: int) -> None:
        """See `Driver`."""
        del self._graphs[graph]
        self._drop(graph)


def _move(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)
