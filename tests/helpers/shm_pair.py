"""A shared-memory ring whose ends are in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from crossfade.channels.ring_layout import RingBlock, RingLayout, format_ring
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.host.memory import Heap, Memory
from tests.helpers.bells import new_bell


@contextmanager
def open_shm_pair(depth: int, num_readers: int) -> Iterator[tuple[ShmWriter, list[ShmReader]]]:
    layout = RingLayout(depth, num_readers)
    board_memory, heap = Memory.create("board", layout.size_bytes), Memory.create("heap", 0)
    board = board_memory.map(layout.size_bytes)
    block = RingBlock(board, 0, layout)
    format_ring(*block)
    bells = [new_bell() for _ in range(num_readers + 1)]
    writer = ShmWriter("c", block, Heap(heap), bells[1:])
    readers = [ShmReader("c", block, index, heap, bells[0]) for index in range(num_readers)]
    try:
        yield writer, readers
    finally:
        writer.close()
        for reader in readers:
            reader.close()
        for memory in (board_memory, heap):
            memory.close()
        for bell in bells:
            bell.close()
