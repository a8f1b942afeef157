"""Rings whose writer, or whose readers, have a device; all ends in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crossfade.channels.ring_layout import RingBlock, RingLayout, format_ring
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.device.context import DeviceContext
from crossfade.device.driver import TimedDriver
from crossfade.device.memory import Pool
from crossfade.device.streams import Streams
from crossfade.edges.by_host import open_from_host, open_to_host
from crossfade.edges.host_copies import HostCopies
from crossfade.host.memory import Heap, Memory
from tests.helpers.bells import new_bell
from tests.helpers.waiting import until

LIMIT_S = 20.0
LONG_US = 1e6
"""So long a spin that the thread does nothing: the test is the main thread that looks."""


def home_on(driver: TimedDriver) -> DeviceContext:
    return DeviceContext(driver, Pool(driver), Streams(driver))


@dataclass
class Ring:
    """A channel and what its ends share."""

    writer: Any
    readers: list[Any]
    copies: HostCopies
    home: DeviceContext

    @property
    def reader(self) -> Any:
        return self.readers[0]

    def close_ends(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()


def write(ring: Ring, value: object) -> None:
    until(lambda: ring.writer.try_write(value), "room")


@contextmanager
def open_ring(
    driver: TimedDriver,
    *,
    depth: int = 2,
    num_readers: int = 1,
    writes_from_device: bool = True,
    reads_onto: str = "",
    spin_us: float = 0.0,
    buffer_bytes: int = 0,
) -> Iterator[Ring]:
    """A ring whose writer has the device, or whose readers have it and bring tensors there as ``reads_onto`` says, or both."""
    layout = RingLayout(depth, num_readers)
    board_memory, heap = Memory.create("board", layout.size_bytes), Memory.create("heap", 0)
    block = RingBlock(board_memory.map(layout.size_bytes), 0, layout)
    format_ring(*block)
    bells = [new_bell() for _ in range(num_readers + 1)]
    home = home_on(driver)
    copies = HostCopies([home], bells[0], spin_us)
    writer: Any
    if writes_from_device:
        where: Any = {"actor": "A", "node": "A.f (node n0)"}
        writer = open_to_host("c", block, Heap(heap), bells[1:], copies, buffer_bytes=buffer_bytes, **where)
    else:
        writer = ShmWriter("c", block, Heap(heap), bells[1:], buffer_bytes=buffer_bytes)
    readers: list[Any] = []
    for index in range(num_readers):
        args = "c", block, index, heap, bells[0]
        readers.append(open_from_host(*args, copies, reads_onto) if reads_onto else ShmReader(*args))
    ring = Ring(writer, readers, copies, home)
    is_failed = True
    try:
        yield ring
        is_failed = False
    finally:
        ring.close_ends()
        is_closed = copies.close(0 if is_failed else LIMIT_S)
        home.streams.close()
        home.pool.close()
        for memory in (board_memory, heap):
            memory.close()
        for bell in bells:
            bell.close()
        assert is_closed or is_failed
        assert is_failed or driver.ledger.held() == []
