"""Both ends of channels whose tensors travel apart, in one process, over drivers whose device is the CPU."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from crossfade.channels.protocol import Reader, Writer
from crossfade.channels.ring_layout import RingBlock, RingLayout, format_ring
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.device.context import DeviceContext
from crossfade.device.host_driver import HostDriver
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.edges.by_copies import OutgoingCopies
from crossfade.edges.by_copies_in import IncomingCopies
from crossfade.edges.host_copies import Joiner
from crossfade.edges.layout import DeviceLayout, Lanes, format_lanes
from crossfade.edges.reader import DeviceReader
from crossfade.edges.writer import DeviceWriter
from crossfade.host.memory import PAGE_BYTES, Heap, Memory, align
from tests.helpers.bells import new_bell
from tests.helpers.host_rings import home_on
from tests.helpers.waiting import until

LIMIT_S = 30.0


def host_home() -> DeviceContext:
    return home_on(HostDriver(10.0))


class Served:
    """An end whose process makes progress with all ends whenever it is called, as an actor's loop does."""

    def __init__(self, end: Any, others: Sequence[Any]) -> None:
        self._end = end
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def try_write(self, value: object) -> bool:
        progress(self._others)
        return bool(self._end.try_write(value))

    def try_read(self) -> object:
        progress(self._others)
        return self._end.try_read()


def progress(ends: Sequence[Any]) -> bool:
    return any([end.carrier.progress() for end in ends])


def lose(writer: DeviceWriter, reader: int, reason: str) -> None:
    """What an engine does with a writer when the process of a reader has died."""
    writer.carrier.mute(reader, reason)
    writer.break_off(reason)


def settle(ends: Sequence[Any]) -> None:
    until(lambda: all([end.drain() for end in ends]), "the ends' drain", LIMIT_S)


class Edge:
    """What the ends of one channel share: the board with a ring and lanes behind it, a heap, bells, a device for each end.

    Args:
        depth, num_readers: of the ring.
        lanes: what lies behind the ring; None for nothing.
        num_sources: devices of the writer.
    """

    def __init__(
        self,
        depth: int,
        num_readers: int,
        lanes: DeviceLayout | None = None,
        num_sources: int = 1,
        make_home: Callable[[], DeviceContext] = host_home,
        new_bell: Callable[[], Any] = new_bell,
    ) -> None:
        layout = RingLayout(depth, num_readers)
        size_bytes = layout.size_bytes + (lanes.size_bytes if lanes is not None else 0)
        self.heap = Memory.create("heap", 0)
        self.memories = [Memory.create("board", size_bytes), self.heap]
        board = self.memories[0].map(size_bytes)
        format_ring(board, 0, layout)
        self.block = RingBlock(board, 0, layout)
        if lanes is not None:
            format_lanes(board, layout.size_bytes, lanes)
            self.lanes = Lanes(board, layout.size_bytes, lanes)
        self.bells = [new_bell() for _ in range(num_readers + 1)]
        self.homes = [make_home() for _ in range(num_readers + num_sources)]
        self.num_sources = num_sources

    @property
    def sources(self) -> list[DeviceContext]:
        return self.homes[: self.num_sources]

    @property
    def targets(self) -> list[list[DeviceContext]]:
        """Of each reader: its device, once for each of the writer's."""
        return [[home] * self.num_sources for home in self.homes[self.num_sources :]]

    def memory(self, name: str, size_bytes: int) -> Memory:
        self.memories.append(Memory.create(name, size_bytes))
        return self.memories[-1]

    def ring_writer(self, name: str = "c") -> ShmWriter:
        return ShmWriter(name, self.block, Heap(self.heap), self.bells[1:])

    def ring_reader(self, index: int, name: str = "c") -> ShmReader:
        return ShmReader(name, self.block, index, self.heap, self.bells[0])

    @contextmanager
    def opened(self, writer: DeviceWriter, readers: list[DeviceReader], dead: Container[Any] = ()) -> Iterator[None]:
        """On leaving, nothing may be held, but by ends of processes that are ``dead`` by then."""
        try:
            yield
        finally:
            ends: list[Any] = [end for end in (writer, *readers) if end not in dead]
            for end in ends:
                end.close()
            settle(ends)
            live = [reader for reader in readers if reader not in dead]
            with suppress(TimeoutError):  # `close_homes` finds what is held
                until(
                    lambda: not any(end.carrier.is_referenced for end in live),
                    limit_s=LIMIT_S,
                    then=partial(progress, live),
                )
            for end in ends:
                end.carrier.release()
            for memory in self.memories:
                memory.close()
            for bell in self.bells:
                bell.close()

    def close_homes(self, alive: Sequence[bool]) -> None:
        for home, is_alive in zip(self.homes, alive, strict=True):
            if is_alive:
                home.streams.close()
                home.pool.close()
                assert home.driver.ledger.held() == []


@contextmanager
def open_copy_ends(
    depth: int,
    num_readers: int,
    num_slots: int = 2,
    make_home: Callable[[], DeviceContext] = host_home,
    *,
    num_sources: int = 1,
    new_bell: Callable[[], Any] = new_bell,
    dead: Container[Any] = (),
) -> Iterator[tuple[DeviceWriter, list[DeviceReader]]]:
    """A writer and its readers, each with a driver of its own (a writer of several sources: one for each)."""
    layout = DeviceLayout(num_readers, num_sources, num_slots)
    edge = Edge(depth, num_readers, layout, num_sources, make_home, new_bell)
    signal_memory = edge.memory("signals", align(layout.num_signals * WORD_BYTES, PAGE_BYTES))
    boards = [HostBoard(home.driver, signal_memory, layout.num_signals, "c") for home in edge.homes]
    carrier = OutgoingCopies(edge.ring_writer(), edge.lanes, edge.sources, boards[:num_sources], edge.bells[1:])
    writer, readers = DeviceWriter(carrier), []
    for index, (homes, board) in enumerate(zip(edge.targets, boards[num_sources:], strict=True)):
        ring, signals = edge.ring_reader(index), [board] * num_sources
        args = "c", index, edge.lanes, homes, signals, edge.bells[0], ring.nudge(), Joiner(None)
        readers.append(DeviceReader(ring, IncomingCopies(*args)))
    with edge.opened(writer, readers, dead):
        yield writer, readers
    alive = [end not in dead for end in [writer] * num_sources + readers]
    for board, is_alive in zip(boards, alive, strict=True):
        if is_alive:
            board.close()
    edge.close_homes(alive)


def pair_of(
    open_ends: Callable[..., AbstractContextManager[tuple[DeviceWriter, list[DeviceReader]]]],
) -> Callable[..., AbstractContextManager[tuple[Writer, Sequence[Reader]]]]:
    """For the conformance suite: ends that make progress by themselves."""

    @contextmanager
    def open_pair(depth: int, num_readers: int, **options: Any) -> Iterator[tuple[Writer, Sequence[Reader]]]:
        with open_ends(depth, num_readers, **options) as (writer, readers):
            ends: list[Any] = [writer, *readers]
            served: list[Any] = [Served(end, ends) for end in ends]
            yield served[0], served[1:]

    return open_pair


open_copy_pair = pair_of(open_copy_ends)
