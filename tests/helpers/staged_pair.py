"""Both ends of a staged channel in one process, over drivers whose device is the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crossfade.device.context import DeviceContext
from crossfade.device.staged_layout import StagedLayout
from crossfade.edges.by_staging import Chunks, IncomingChunks, OutgoingChunks
from crossfade.edges.host_copies import Joiner
from crossfade.edges.layout import DeviceLayout
from crossfade.edges.reader import DeviceReader
from crossfade.edges.writer import DeviceWriter
from crossfade.host.memory import PAGE_BYTES
from tests.helpers.copy_pair import Edge, host_home, pair_of

TINY = StagedLayout(num_chunks=2, chunk_bytes=PAGE_BYTES)
"""Much less than most values need."""


@contextmanager
def open_staged_ends(
    depth: int,
    num_readers: int,
    layout: StagedLayout = TINY,
    make_home: Callable[[], DeviceContext] = host_home,
    *,
    num_sources: int = 1,
) -> Iterator[tuple[DeviceWriter, list[DeviceReader]]]:
    """A writer and its readers, each with a driver of its own (a writer of several sources: one for each)."""
    lanes = DeviceLayout(num_readers, num_sources, 0)
    edge = Edge(depth, num_readers, lanes, num_sources, make_home)
    chunks = Chunks(edge.memory("chunks", PAGE_BYTES + lanes.num_lanes * layout.size_bytes), PAGE_BYTES, layout)
    writer = DeviceWriter(OutgoingChunks(edge.ring_writer(), edge.lanes, chunks, edge.sources, edge.bells[1:]))
    readers = []
    for index, homes in enumerate(edge.targets):
        carrier = IncomingChunks("c", index, edge.lanes, chunks, homes, edge.bells[0], Joiner(None))
        readers.append(DeviceReader(edge.ring_reader(index), carrier))
    with edge.opened(writer, readers):
        yield writer, readers
    edge.close_homes([True] * len(edge.homes))


open_staged_pair = pair_of(open_staged_ends)
