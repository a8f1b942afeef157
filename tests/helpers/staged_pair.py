"""Both ends of a staged channel in one process, over drivers whose device is the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from crossfade.channels.protocol import Reader, Writer
from crossfade.channels.ring_layout import RingLayout, format_ring
from crossfade.device.home import DeviceHome
from crossfade.device.staged_layout import Cut, StagedLayout
from crossfade.edges.layout import DeviceLayout, format_lanes
from crossfade.edges.staged_engine import StagedReader, StagedWriter
from crossfade.edges.staged_lane import Chunks
from crossfade.host.memory import PAGE_BYTES, Heap, Memory
from tests.helpers.copy_pair import Served, host_home, make_bell, settle

TINY = StagedLayout(num_chunks=2, chunk_bytes=PAGE_BYTES, cut=Cut.FULL)
"""Much less than most values need."""


@contextmanager
def open_staged_ends(
    depth: int,
    num_readers: int,
    layout: StagedLayout = TINY,
    make_home: Callable[[], DeviceHome] = host_home,
    *,
    num_sources: int = 1,
) -> Iterator[tuple[StagedWriter, list[StagedReader]]]:
    """A writer and its readers, each with a driver of its own (a writer of several sources: one for each). On leaving, nothing may
    be held.
    """
    ring, lanes = RingLayout(depth, num_readers), DeviceLayout(num_readers, num_sources, 0)
    size_bytes = ring.size_bytes + lanes.size_bytes
    board_memory, heap = Memory.create("board", size_bytes), Memory.create("heap", 0)
    chunk_memory = Memory.create("chunks", PAGE_BYTES + lanes.num_lanes * layout.size_bytes)
    board = board_memory.map(size_bytes)
    format_ring(board, 0, ring)
    format_lanes(board, ring.size_bytes, lanes)
    bells = [make_bell() for _ in range(num_readers + 1)]
    homes = [make_home() for _ in range(num_readers + num_sources)]
    chunks = Chunks(chunk_memory, PAGE_BYTES, layout)
    shared: dict[str, Any] = {"lanes_offset": ring.size_bytes, "layout": lanes, "chunks": chunks}
    writer = StagedWriter("c", board, 0, ring, Heap(heap), bells[1:], homes=homes[:num_sources], **shared)
    readers = [
        StagedReader("c", board, 0, ring, index, heap, bells[0], homes=[home] * num_sources, **shared)
        for index, home in enumerate(homes[num_sources:])
    ]
    try:
        yield writer, readers
    finally:
        ends: list[Any] = [writer, *readers]
        for end in ends:
            end.close()
        settle(ends)
        assert all(reader.is_empty for reader in readers)
        for end in ends:
            end.give_back()
        for memory in (board_memory, heap, chunk_memory):
            memory.close()
        for bell in bells:
            bell.close()
        for home in homes:
            home.streams.close()
            home.pool.close()
            assert home.driver.ledger.held() == []


@contextmanager
def open_staged_pair(depth: int, num_readers: int, **options: Any) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    """For the conformance suite."""
    with open_staged_ends(depth, num_readers, **options) as (writer, readers):
        ends: list[Any] = [writer, *readers]
        served: list[Any] = [Served(end, ends) for end in ends]
        yield served[0], served[1:]
