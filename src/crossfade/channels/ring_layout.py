"""Where the parts of a shared-memory ring lie on the board (channels/shm_ring.py tells what they are for)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final, NamedTuple

from crossfade.host.memory import address_of, align
from crossfade.host.semaphore import SEMAPHORE_BYTES, init_semaphore

RECORD_BYTES: Final = 1024
INLINE_BYTES: Final = 1016  # behind the record's first word
HEAD_BYTES: Final = 64  # the flags

# What a record holds. (Each a constant of its own, so that compiled code has the number.)
PICKLE: Final = 1
BYTES: Final = 2
MESSAGE: Final = 3
SLOT_BYTES: Final = 4
SLOT_MESSAGE: Final = 5
TENSOR: Final = 6
TENSOR_AHEAD: Final = 7
REPLACED: Final = 8
SIMPLE: Final = 9
ARRAY: Final = 10
SLOT_ARRAY: Final = 11
DESCRIPTION_AT: Final = 40  # in the record of an array, behind five words
"""A record starts with the word (size << 8 | kind).

- ``SLOT_BYTES``, ``SLOT_MESSAGE``: bytes, or a message, in a slot. Three more words are its number, offset in the heap, capacity.
- ``TENSOR``: a tensor by itself (`crossfade.edges.by_copies`). ``TENSOR_AHEAD``: the same, published before its copies are
  enqueued; a semaphore tells when they are, and the reader then looks at the record once more.
- ``SIMPLE``: a number, a short text, True, False or None, as `marshal` writes it: in half of pickle's time.
- ``ARRAY``, ``SLOT_ARRAY``: a numpy array by itself, its ``size`` bytes in the record or at the start of a slot. Three more words
  name the slot, one more has the length of the array's description (`crossfade.channels.values.arrays`), which comes next; then,
  for ``ARRAY``, the bytes.
- ``REPLACED``: an error is being written into a record that readers may have seen. They look again.
"""


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Where the parts of a ring's block lie, as offsets in bytes."""

    depth: int
    num_readers: int

    @property
    def num_slots(self) -> int:
        """The most large slots that can ever be needed."""
        return self.depth * (1 + self.num_readers)

    def items(self, reader: int) -> int:
        return HEAD_BYTES + 2 * reader * SEMAPHORE_BYTES

    def credits(self, reader: int) -> int:
        return self.items(reader) + SEMAPHORE_BYTES

    def freed(self, slot: int) -> int:
        return self.items(self.num_readers) + slot * SEMAPHORE_BYTES

    @property
    def records(self) -> int:
        return align(self.freed(self.num_slots), 64)

    @property
    def size_bytes(self) -> int:
        return self.records + self.depth * RECORD_BYTES


class RingBlock(NamedTuple):
    """Where a ring's block lies: the mapped board, the offset in bytes, the layout."""

    board: mmap.mmap
    offset: int
    layout: RingLayout


def format_ring(board: mmap.mmap, offset: int, layout: RingLayout) -> None:
    """Makes a block of zeroed memory an empty ring. Done once, before either side opens it."""
    base = address_of(board, offset)
    for reader in range(layout.num_readers):
        init_semaphore(base + layout.items(reader), 0)
        init_semaphore(base + layout.credits(reader), layout.depth)
    for slot in range(layout.num_slots):
        init_semaphore(base + layout.freed(slot), 0)
