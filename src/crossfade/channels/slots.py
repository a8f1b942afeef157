"""The large slots of a shared-memory ring, as its writer and its readers see them (channels/shm_ring.py tells the whole)."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pickle import PickleBuffer
from typing import Any, Final, TypeVar

from crossfade.channels.ring_layout import RingLayout
from crossfade.errors import ChannelError
from crossfade.host.memory import PAGE_BYTES, Heap, Memory
from crossfade.host.semaphore import open_semaphore
from crossfade.interrupted import brief

_T = TypeVar("_T")

_ROTATION_BYTES: Final = 2 << 20
"""Slots are taken in turn, at least this much memory of them: a slot that the reader's core still has in its cache is two to
four times slower to write (docs/decisions/0001)."""

_num_forks: Final = [0]
"""Forks begun by this process and by those it was forked from. `os.getpid` takes as long as the rest of a view's end."""


def _forking() -> None:
    _num_forks[0] += 1


os.register_at_fork(before=_forking)  # views may end in the child before its own hooks run


def _num_in_turn(size_bytes: int) -> int:
    """How many slots of a size take turns: as few as have that memory, for they take room in caches, but two rather than one."""
    return max(2, -(-_ROTATION_BYTES // size_bytes)) if size_bytes <= _ROTATION_BYTES else 1


class WriterSlots:
    """The large slots of a ring, as its writer sees them."""

    def __init__(self, heap: Heap, base: int, layout: RingLayout) -> None:
        self._heap = heap
        self._base = base
        self._layout = layout
        self._pieces: list[tuple[int, int, mmap.mmap]] = []  # of each slot: offset, capacity, memory
        self._freed: list[Any] = []  # of each slot: acquire
        self._num_left: list[int] = []  # of each slot: readers that have not freed it
        self._free: deque[int] = deque()  # the one that was freed last at the end
        self._busy: deque[int] = deque()  # the one that was taken first at the start

    @property
    def num_slots(self) -> int:
        return len(self._pieces)

    @property
    def size_bytes(self) -> int:
        return sum(capacity for _, capacity, _ in self._pieces)

    def set_aside(self, num_slots: int, size_bytes: int) -> None:
        """Makes slots before they are needed, their pages touched."""
        for _ in range(num_slots):
            self._free.append(self._add(size_bytes))

    def take(self, size_bytes: int) -> tuple[int, int, int, mmap.mmap]:
        """A free slot with room for ``size_bytes``: (slot, offset, capacity, memory). A LookupError if another thread closes it."""
        busy, free = self._busy, self._free
        while busy and self._is_freed(busy[0]):  # the first has been away for longest
            free.append(busy.popleft())
        if not free:
            for slot in list(busy):
                if self._is_freed(slot):
                    self._leave_busy(slot)
                    free.append(slot)
        num_wanted = min(self._layout.depth, _num_in_turn(size_bytes))
        num_free = len(free)
        if num_free == 0 or len(self._pieces) < num_wanted:
            slot = self._add(size_bytes)
        elif num_free <= num_wanted:
            slot = free.popleft()
        else:  # more than need to take turns: the others would only take room in caches
            large = [k for k, each in enumerate(list(free)) if self._pieces[each][1] >= size_bytes]
            index = large[-num_wanted] if len(large) >= num_wanted else 0
            slot = free[index]
            del free[index]
        try:
            if self._pieces[slot][1] < size_bytes:
                self._grow(slot, size_bytes)
        except OSError:
            free.appendleft(slot)
            raise
        self._num_left[slot] = self._layout.num_readers
        busy.append(slot)
        offset, capacity, memory = self._pieces[slot]
        return slot, offset, capacity, memory

    def put_back(self, slot: int) -> None:
        """The slot was taken and not used."""
        self._leave_busy(slot)
        self._free.appendleft(slot)

    def close(self) -> None:
        self._pieces = []
        self._busy.clear()
        self._free.clear()

    def _leave_busy(self, slot: int) -> None:
        try:
            self._busy.remove(slot)
        except ValueError:
            raise LookupError("another thread has closed the ring") from None

    def _is_freed(self, slot: int) -> bool:
        """Whether all readers have freed a busy slot."""
        num_left, acquire = self._num_left[slot], self._freed[slot]
        while num_left and acquire(False):
            num_left -= 1
        self._num_left[slot] = num_left
        return num_left == 0

    def _piece(self, size_bytes: int) -> tuple[int, int, mmap.mmap]:
        # An eighth more than asked for, so that values which grow a little do not move every time.
        offset, capacity = self._heap.allocate(size_bytes + size_bytes // 8)
        return offset, capacity, self._heap.memory.map(capacity, offset, populate=True)

    def _add(self, size_bytes: int) -> int:
        slot = len(self._pieces)
        if slot == self._layout.num_slots:
            raise ChannelError(f"all {slot} slots of a ring are taken, which cannot be: this is a bug in crossfade")
        self._pieces.append(self._piece(size_bytes))
        self._freed.append(open_semaphore(self._base + self._layout.freed(slot)).acquire)
        self._num_left.append(0)
        return slot

    def _grow(self, slot: int, size_bytes: int) -> None:
        old_offset, old_capacity, _ = self._pieces[slot]
        self._pieces[slot] = self._piece(size_bytes)
        self._heap.discard(old_offset, old_capacity)


@dataclass(slots=True)
class Mapped:
    """A slot as it is mapped now."""

    offset: int  # in the heap, in bytes
    capacity: int
    mapping: mmap.mmap | memoryview
    readonly: Any  # a memoryview of all of it (the compiler takes no field of that type)
    array_type: Any  # the ctypes type of all of it; making a type for each value would cost more than the rest
    on_death: Callable[[Any], None]  # called when the last view of a value has died


class ReaderSlots:
    """The large slots of a ring, as one reader sees them."""

    def __init__(self, memory: Memory, board: mmap.mmap, base: int, layout: RingLayout) -> None:
        self._memory = memory
        self._board = board  # a view may die, and free its slot, after the reader is gone
        self._base = base
        self._layout = layout
        self._mapped: dict[int, Mapped] = {}  # by slot
        self._frees: dict[int, Any] = {}  # slot: release
        self._kept: dict[int, weakref.ref[Any]] = {}  # slot: the exporter that all views of it hang on
        self._pid = os.getpid()
        self._num_forks = _num_forks[0]  # when `_pid` was last compared with this process

    @property
    def num_kept(self) -> int:
        """Slots on which views are alive."""
        return len(self._kept)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child's copy."""
        num_forks = _num_forks[0]
        if num_forks != self._num_forks:
            if os.getpid() != self._pid:
                return True
            self._num_forks = num_forks
        return False

    def copied(self, make: Callable[[memoryview], _T], slot: int, offset: int, capacity: int, size: int) -> _T:
        """A copy of the message; the slot is free at once."""
        mapped = self._map(slot, offset, capacity)
        try:
            return make(memoryview(mapped.mapping)[:size])
        finally:
            self._frees[slot]()

    def view(self, slot: int, offset: int, capacity: int, size: int) -> memoryview:
        """The message where it lies; the slot is free when the last view of it dies."""
        mapped = self._map(slot, offset, capacity)
        # A memoryview of a memoryview would not keep the first one alive; a ctypes array is kept by every view of it.
        exporter = mapped.array_type.from_buffer(mapped.mapping)
        self._kept[slot] = weakref.ref(exporter, mapped.on_death)
        return memoryview(exporter)[:size]

    def exported(self, slot: int, offset: int, capacity: int) -> Any:
        """The slot, read-only, as the buffer of one array, which then keeps it; as for `view`, but quicker made."""
        mapped = self._map(slot, offset, capacity)
        exporter = PickleBuffer(mapped.readonly)
        self._kept[slot] = weakref.ref(exporter, mapped.on_death)
        return exporter

    def close(self) -> None:
        """Releases the memory on which there are no views (it is part of a cycle of references, which is broken here)."""
        self._mapped = {}

    def _died(self, slot: int, _: object) -> None:
        # First out of the books, then free: the writer may fill it, and we may read it again, from then on.
        del self._kept[slot]
        if not self.is_foreign:  # a forked child drops copies of views: the slot is still its parent's
            self._frees[slot]()

    def _map(self, slot: int, offset: int, capacity: int) -> Mapped:
        if slot in self._kept:
            raise ValueError(f"a damaged record names slot {slot}, on which views of an earlier value are alive")
        known = self._mapped.get(slot)
        if known is None:
            self._frees[slot] = open_semaphore(self._base + self._layout.freed(slot)).release
        if known is None or known.offset != offset or known.capacity != capacity:
            try:
                mapping = self._piece_at(offset, capacity)
            except BaseException:
                self._frees[slot]()  # nobody here will ever look at it
                raise
            readonly = memoryview(mapping).toreadonly()
            known = Mapped(offset, capacity, mapping, readonly, ctypes.c_uint8 * capacity, partial(self._died, slot))
            self._mapped[slot] = known
        return known

    def _piece_at(self, offset: int, capacity: int) -> mmap.mmap | memoryview:
        end = self._memory.size_bytes  # it never shrinks (host/memory.py), so nothing behind it is ever touched
        if offset % PAGE_BYTES or not 0 < capacity <= end - offset:
            raise ValueError(f"a damaged record names {capacity} bytes at {offset} of a heap that has {end}")
        return self._map_piece(offset, capacity)

    def _map_piece(self, offset: int, capacity: int) -> mmap.mmap | memoryview:
        return self._memory.map(capacity, offset, populate=True)


brief(ReaderSlots._died)
