"""The reading end of the shared-memory ring (``channels.shm_ring`` tells the whole)."""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Callable
from typing import Any, Final, Protocol

from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.ring_layout import (
    ARRAY,
    BYTES,
    DESCRIPTION_AT,
    INLINE_BYTES,
    MESSAGE,
    PICKLE,
    RECORD_BYTES,
    SIMPLE,
    SLOT_ARRAY,
    SLOT_BYTES,
    SLOT_MESSAGE,
    RingBlock,
)
from crossfade.channels.shm_ring import READER_GONE, WANTED, WRITER_GONE, RingEnd
from crossfade.channels.slots import ReaderSlots
from crossfade.channels.values.codec import array_codec, decode, undecodable
from crossfade.errors import ChannelError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory
from crossfade.host.semaphore import FENCE_AFTER_POST, open_semaphore

_loads: Final = pickle.loads
_simple: Final = marshal.loads
_SLOT_KINDS: Final = frozenset({SLOT_BYTES, SLOT_MESSAGE, SLOT_ARRAY})


class Decode(Protocol):
    """Makes a value of a message."""

    def __call__(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        """The message is writable, and the value may keep views on it. It lies in ``slot``, or was copied out if that is None;
        ``is_private`` says that no other reader has the same memory.
        """


class ReadRecord(Protocol):
    """Makes a value of a record that the ring does not know."""

    def __call__(self, ring: ShmReader, at: int, kind: int, size: int) -> object:
        """``at``: offset of the record on the board. Returns `EMPTY` after `ShmReader.put_back`."""


def _decode(ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
    return decode(message, private=memoryview if is_private else bytearray)


class ShmReader(RingEnd):
    """One reading end."""

    def __init__(
        self,
        name: str,
        block: RingBlock,
        index: int,
        heap_memory: Memory,
        bell: Bell,
        *,
        slots: ReaderSlots | None = None,  # takes the place of `ReaderSlots`
    ) -> None:
        super().__init__(name, block, WRITER_GONE)
        self.index = index
        items = open_semaphore(self.base + self.layout.items(index))
        self._take, self.put_back = items.acquire, items.release
        self.is_idle = items._is_zero  # a method of the interpreter's own: no Python frame in a spinning loop
        self._post_credit = open_semaphore(self.base + self.layout.credits(index)).release
        self._bell = bell
        self._bell_flags, self._ring = bell.flags, bell.ring
        self._slots = slots or ReaderSlots(heap_memory, block.board, self.base, self.layout)
        # Makes values of messages. An owner of the ring may set another one, which must not hold the ring.
        self.decode: Decode = _decode
        # Makes values of records of other kinds; None if there are none. It must not hold the ring.
        self.read_record: ReadRecord | None = None
        self.on_end: Callable[[], None] | None = None  # called before `raise_if_ended` raises
        self._is_alone = self.layout.num_readers == 1
        # Of the last array that came by itself: the next one is mostly of its kind.
        self._description = b""
        self._understood: Any = None
        self._num_copied_out = 0

    def try_start(self) -> bool:
        return True

    def try_read(self) -> object:
        if not self._take(False):
            if not (self._state[WRITER_GONE] or self.is_closed):
                return EMPTY
            if self.is_closed or not self._take(False):  # a value may have come before the end did
                self.raise_if_ended()
                return EMPTY
        at = self.at
        word = self.words[at >> 3]
        kind, size = word & 255, word >> 8
        try:
            if kind == SIMPLE:
                value = _simple(self.board[at + 8 : at + 8 + min(size, INLINE_BYTES)])
            elif kind == BYTES:
                value = self.board[at + 8 : at + 8 + min(size, INLINE_BYTES)]
            elif kind == PICKLE:
                value = _loads(self.board[at + 8 : at + 8 + min(size, INLINE_BYTES)])
            elif kind in (ARRAY, SLOT_ARRAY):
                value = self._read_array(at, kind, size)
            elif kind > SLOT_MESSAGE and self.read_record is not None:
                value = self.read_record(self, at, kind, size)
            else:
                value = self._read_message(at, kind, size)
        except ChannelError:
            raise
        except Exception as error:
            if self.is_closed:
                self.raise_if_ended()  # another thread has closed it meanwhile
            value = undecodable(error, self.name)
        if value is EMPTY:  # `read_record` has put the record back
            return EMPTY
        at += RECORD_BYTES
        self.at = self._first if at == self._end else at
        self.num_values += 1
        self._post_credit()
        if FENCE_AFTER_POST:
            self._fence()
        if self._state[WANTED] and self._bell_flags[0]:
            self._ring()
        return value

    def value_of(self, kind: int, payload: bytes) -> object:
        """The value of a record that has not lain in the ring."""
        self.num_values += 1
        if kind == BYTES:
            return payload
        try:
            return _loads(payload)
        except ChannelError:
            raise
        except Exception as error:
            return undecodable(error, self.name)

    def raise_if_ended(self) -> None:
        if self.on_end is not None and (self.is_closed or self.is_other_gone):
            self.on_end()
        super().raise_if_ended()

    def nudge(self) -> Callable[[], None]:
        """What wakes the writer, if it waits for something of this side that was posted before. It outlives this end."""
        state, bell, fence = self._state, self._bell, self._fence

        def nudge() -> None:
            if FENCE_AFTER_POST:
                fence()
            if state[WANTED] and bell.flags[0]:
                bell.ring()

        return nudge

    def payload(self, at: int, size: int) -> bytes:
        """What a record holds that lies in no slot."""
        return self.board[at + 8 : at + 8 + min(size, INLINE_BYTES)]

    def _read_message(self, at: int, kind: int, size: int) -> object:
        if kind == MESSAGE:
            return self.decode(self, memoryview(bytearray(self.payload(at, size))), None, True)
        slot, offset, capacity = self._slot_of(at, kind, size)
        if kind == SLOT_BYTES:
            return self._slots.copied(bytes, slot, offset, capacity, size)
        if self._slots.num_kept >= self.layout.depth:
            self._num_copied_out += 1
            return self.decode(
                self, memoryview(self._slots.copied(bytearray, slot, offset, capacity, size)), None, True
            )
        return self.decode(self, self._slots.view(slot, offset, capacity, size), slot, self._is_alone)

    def _read_array(self, at: int, kind: int, size: int) -> object:
        start = at + DESCRIPTION_AT
        data_at = start + min(self.words[(at >> 3) + 4], RECORD_BYTES - DESCRIPTION_AT)
        data: Any
        if kind == ARRAY:
            data = self.board[data_at : data_at + min(size, INLINE_BYTES)]
        else:
            slot, offset, capacity = self._slot_of(at, kind, size)
            if self._slots.num_kept >= self.layout.depth:
                self._num_copied_out += 1
                data = self._slots.copied(bytes, slot, offset, capacity, size)
            else:
                data = self._slots.exported(slot, offset, capacity)
        description = self.board[start:data_at]
        if description != self._description:
            self._understood, self._description = array_codec().understand(description), description
        return array_codec().make(self._understood, data, size)

    def _slot_of(self, at: int, kind: int, size: int) -> tuple[int, int, int]:
        """(slot, offset, capacity) that a record names, whose value has ``size`` bytes. Raises a ValueError if that cannot be."""
        word = at >> 3
        slot, offset, capacity = self.words[word + 1], self.words[word + 2], self.words[word + 3]
        if kind not in _SLOT_KINDS or slot >= self.layout.num_slots or size > capacity:
            raise ValueError(
                f"a record of channel {self.name} is damaged: kind {kind}, slot {slot}, {size} of {capacity} bytes"
            )
        self._num_bytes += size
        return slot, offset, capacity

    def release(self) -> None:
        """Nothing to do: a slot is free when its last view dies."""

    def leave(self) -> None:
        """The part of `close` that the writer sees, for owners that set `is_closed` before."""
        if not self._has_left:
            self._has_left = True
            self.tell_closed(READER_GONE, (self._bell,))
        self._slots.close()

    def close(self) -> None:
        self.is_closed = True
        self.leave()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(
            self.num_values,
            self._num_bytes,
            num_copied_out=self._num_copied_out,
            num_kept=self._slots.num_kept,
        )
