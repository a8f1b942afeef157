"""Both ends of a copy-engine channel in one process, over drivers whose device is the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from crossfade.channels.protocol import Reader, Writer
from crossfade.channels.ring_layout import RingLayout, format_ring
from crossfade.device.home import DeviceHome
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Pool
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.device.streams import Streams
from crossfade.edges.copy_engine import CopyWriter
from crossfade.edges.copy_reader import CopyReader
from crossfade.edges.layout import DeviceLayout, format_lanes
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import PAGE_BYTES, Heap, Memory, align

LIMIT_S = 30.0


def make_bell() -> Bell:
    memory_fd, event_fd = Doorbell.create_fds("test")
    return Bell(Memory(memory_fd), event_fd)


def host_home() -> DeviceHome:
    driver = HostDriver(10.0)
    return DeviceHome(driver, Pool(driver), Streams(driver))


class Served:
    """An end whose process sees to what is not on a value's way whenever it is called, as an actor's loop does."""

    def __init__(self, end: Any, others: Sequence[Any]) -> None:
        self._end = end
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def _serve(self) -> None:
        for end in self._others:
            end.serve()

    def try_write(self, value: object) -> bool:
        self._serve()
        return bool(self._end.try_write(value))

    def try_read(self) -> object:
        self._serve()
        return self._end.try_read()


def settle(ends: Sequence[Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all([end.settle() for end in ends]):
        assert time.monotonic() < deadline, "the ends did not settle"


@contextmanager
def open_copy_ends(
    depth: int,
    num_readers: int,
    num_slots: int = 2,
    make_home: Callable[[], DeviceHome] = host_home,
    *,
    num_sources: int = 1,
    new_bell: Callable[[], Any] = make_bell,
    dead: Container[Any] = (),
) -> Iterator[tuple[CopyWriter, list[CopyReader]]]:
    """A writer and its readers, each with a driver of its own (a writer of several sources: one for each). On leaving, nothing may
    be held, but by ends of processes that are ``dead`` by then.
    """
    ring, lanes = RingLayout(depth, num_readers), DeviceLayout(num_readers, num_sources, num_slots)
    size_bytes = ring.size_bytes + lanes.size_bytes
    board_memory, heap = Memory.create("board", size_bytes), Memory.create("heap", 0)
    signal_memory = Memory.create("signals", align(lanes.num_signals * WORD_BYTES, PAGE_BYTES))
    board = board_memory.map(size_bytes)
    format_ring(board, 0, ring)
    format_lanes(board, ring.size_bytes, lanes)
    bells = [new_bell() for _ in range(num_readers + 1)]
    homes = [make_home() for _ in range(num_readers + num_sources)]
    boards = [HostBoard(home.driver, signal_memory, lanes.num_signals, "c") for home in homes]
    writer = CopyWriter(
        "c", board, 0, ring, Heap(heap), bells[1:],
        lanes_offset=ring.size_bytes, layout=lanes, homes=homes[:num_sources], signals=boards[:num_sources],
    )  # fmt: skip
    readers = [
        CopyReader(
            "c", board, 0, ring, index, heap, bells[0],
            lanes_offset=ring.size_bytes, layout=lanes, homes=[home] * num_sources, signals=[signals] * num_sources,
        )
        for index, (home, signals) in enumerate(zip(homes[num_sources:], boards[num_sources:], strict=True))
    ]  # fmt: skip
    try:
        yield writer, readers
    finally:
        ends: list[Any] = [end for end in (writer, *readers) if end not in dead]
        for end in ends:
            end.close()
        settle(ends)
        for memory in (board_memory, heap, signal_memory):
            memory.close()
        for bell in bells:
            bell.close()
        deadline = time.monotonic() + LIMIT_S
        live = [reader for reader in readers if reader not in dead]
        while not all(reader.is_empty for reader in live) and time.monotonic() < deadline:
            for reader in live:
                reader.serve()
        owners = [writer] * num_sources + readers
        for signals, home, owner in zip(boards, homes, owners, strict=True):
            if owner in dead:
                continue
            signals.close()
            home.streams.close()
            home.pool.close()
            assert home.driver.ledger.held() == []


@contextmanager
def open_copy_pair(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    """For the conformance suite."""
    with open_copy_ends(depth, num_readers) as (writer, readers):
        ends: list[Any] = [writer, *readers]
        served: list[Any] = [Served(end, ends) for end in ends]
        yield served[0], served[1:]
