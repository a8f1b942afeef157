"""The shared-memory ring: one writer, any number of readers, on one host. (``channels.shm_reader`` has the reading end.)

Two memories carry it. The *board* has one block for each ring: a few flags, semaphores, and ``depth`` records of
`RECORD_BYTES`. A value whose message fits into a record lives there. A larger one lies in a *slot*: a piece of the
writer's *heap*, and the record says which; numpy and torch get views on the slot (no copy), and the slot is free again
when the last view dies.

Who waits for what (R readers, depth D; e counts values):

- ``items[r]`` counts records written and not yet taken by reader r. ``credits[r]`` counts records that r has not to read
  any more: record e is rewritten (as e + D) only with one credit from every reader (PL-3).
- ``freed[s]`` is posted once by each reader that is done with slot s. A reader keeps views on at most D slots; when it
  holds that many, values are copied out and their slot is freed at once. So with D records in flight and R x D slots
  kept, D (1 + R) slots always have a free one, and the writer never waits for a slot: kept values cannot stop the ring.
- Slots are made when first needed and grow when a value does not fit: the piece is given back and a larger one taken.

Memory order: whatever the writer stores before it posts ``items`` is seen by a reader that took it, and the reader is
done with a record or slot before it posts ``credits`` or ``freed`` (host/semaphore.py says why). The flags
are hints: they are set before a fence and looked at after one (host/doorbell.py).

Both ends are also what other channels are built on: they *have* a ring for their messages (`crossfade.edges`). A writer of such a
channel stages a record (`ShmWriter.stage`, `stage_record`, `stage_in_slot`) and publishes it (`publish`). A reader gives a function
that makes values of messages (``decode``), and one for the records that only the channel knows (``read_record``).
"""

from __future__ import annotations

import marshal
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.ring_layout import (
    ARRAY,
    BYTES,
    DESCRIPTION_AT,
    HEAD_BYTES,
    INLINE_BYTES,
    MESSAGE,
    PICKLE,
    RECORD_BYTES,
    REPLACED,
    SIMPLE,
    SLOT_ARRAY,
    SLOT_BYTES,
    SLOT_MESSAGE,
    RingBlock,
)
from crossfade.channels.slots import WriterSlots
from crossfade.channels.values.codec import array_codec, prepare
from crossfade.channels.values.layout import Encoded, Pickled, copy_bytes, encode
from crossfade.errors import ChannelBroken, ChannelClosed, CrossfadeError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, address_of
from crossfade.host.semaphore import FENCE_AFTER_POST, full_fence, open_semaphore

# Bytes at the start of the block; each is set by one side only.
WRITER_GONE: Final = 0
READER_GONE: Final = 1
WANTED: Final = 2


class RingEnd:
    """What both ends share."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, name: str, block: RingBlock, gone: int) -> None:
        self.name = name
        self.layout = block.layout
        self.board = block.board  # semaphores point into it
        self.base = address_of(block.board, block.offset)
        whole = memoryview(block.board)
        self._state = whole[block.offset : block.offset + HEAD_BYTES]
        self.words = whole.cast("Q")
        self._first = block.offset + self.layout.records
        self._end = self._first + self.layout.depth * RECORD_BYTES
        self.at = self._first  # offset on the board of the next record
        self._fence = full_fence()
        self._gone = gone  # the other side's byte
        self._reason = "the other side closed it"
        self.is_closed = False  # whether this side has closed it
        self._has_left = False
        self.num_values = 0  # published or taken
        self._num_bytes = 0

    def break_off(self, reason: str) -> None:
        self._reason = reason
        self._state[self._gone] = 1

    @property
    def is_other_gone(self) -> bool:
        """Whether the other side is closed or broken."""
        return bool(self._state[self._gone])

    def raise_if_ended(self) -> None:
        """Raises `ChannelClosed` or `ChannelBroken` (CH-2), if it has ended."""
        if self.is_closed:
            raise ChannelClosed(f"channel {self.name} was closed by this side")
        if self._state[self._gone]:
            raise ChannelBroken(f"channel {self.name} is broken: {self._reason}")

    def tell_closed(self, own_byte: int, bells: Sequence[Bell]) -> None:
        self._state[own_byte] = 1
        full_fence()()
        for bell in bells:
            bell.ring()


_dumps: Final = marshal.dumps
_MARSHAL_VERSION: Final = 2
"""The newest version without a table of repeated objects, which a single number or text does not need: a third of the time."""
_SIMPLE_TYPES: Final = frozenset({int, float, bool, complex, str, type(None)})

Post: TypeAlias = tuple[Callable[[], Any], Sequence[int] | memoryview, Callable[[], None]]  # see `ShmWriter.posts`


def silent(post: Callable[[], Any]) -> Post:
    """An entry of `ShmWriter.posts` that rings nobody."""
    return post, (0,), _nothing


def _nothing() -> None:
    pass


class ShmWriter(RingEnd):
    """The writing end."""

    def __init__(
        self,
        name: str,
        block: RingBlock,
        heap: Heap,  # the writer's heap; several rings of one writer share it
        bells: Sequence[Bell],  # the readers' doorbells, in the order of the readers
        *,
        buffer_bytes: int = 0,  # size of ``depth`` slots to set aside now, 0 for none
        slots: WriterSlots | None = None,  # takes the place of `WriterSlots`
    ) -> None:
        super().__init__(name, block, READER_GONE)
        semaphores = [
            (open_semaphore(self.base + self.layout.items(r)), open_semaphore(self.base + self.layout.credits(r)))
            for r in range(self.layout.num_readers)
        ]
        self._credits = [credit.acquire for _, credit in semaphores]
        self._num_missing = len(self._credits)  # credits still to be had for the next record
        self.is_wanting = False
        # What `publish` tells, in order: a function to call, the flags of a process, and what rings it if flag 0 is set. One for
        # each reader; an owner of the ring may put others in their place.
        self.posts: list[Post] = [
            (item.release, bell.flags, bell.ring) for (item, _), bell in zip(semaphores, bells, strict=True)
        ]
        self._bells = bells
        # Of the last array that travelled by itself: the next one is mostly of its kind.
        self._dtype: object = None
        self._shape: object = None
        self._description = b""
        self._slots = slots or WriterSlots(heap, self.base, self.layout)
        if buffer_bytes:
            self._slots.set_aside(self.layout.depth, buffer_bytes)

    def try_write(self, value: object) -> bool:
        if not self.has_room():
            return False
        data: bytes | Encoded
        type_ = type(value)
        if type_ is bytes:
            data, kind = value, BYTES  # type: ignore[assignment]
        elif type_ in _SIMPLE_TYPES and (type_ is not str or len(value) <= INLINE_BYTES):  # type: ignore[arg-type]
            data, kind = _dumps(value, _MARSHAL_VERSION), SIMPLE  # type: ignore[arg-type]
        elif (
            (numpy := sys.modules.get("numpy")) is not None and type_ is numpy.ndarray and self._try_stage_array(value)
        ):
            self.publish()
            return True
        else:
            data, kind = prepare(value), PICKLE
        if type(data) is bytes and (size := len(data)) <= INLINE_BYTES:
            start = self.at + 8
            self.board[start : start + size] = data
            self.words[self.at >> 3] = size << 8 | kind
        elif kind == BYTES and isinstance(data, bytes):
            self.stage_in_slot(Encoded(data, (), len(data)), SLOT_BYTES)
        elif kind == SIMPLE:  # a number of over 2,000 digits, or a text that is longer than it has characters
            self.stage(prepare(value))
        else:
            self.stage(data)
        self.publish()
        return True

    def has_room(self) -> bool:
        if self._state[READER_GONE] or self.is_closed:
            self.raise_if_ended()
        while self._num_missing:
            if not self._credits[self._num_missing - 1](False):
                if self.is_wanting:
                    return False
                # A credit that came before this was seen has rung nobody: look once more.
                self.ask_to_be_rung()
                continue
            self._num_missing -= 1
        return True

    def ask_to_be_rung(self) -> None:
        """The readers wake this process from now on when they give anything back; look once more before it sleeps."""
        self._state[WANTED] = 1
        self.is_wanting = True
        full_fence()()

    def stage(self, message: bytes | Encoded) -> None:
        """Writes a pickle or a message where the next value goes; nobody sees it before `publish`. There must be room. Where there
        is no memory for it, it raises and has written nothing.
        """
        if isinstance(message, bytes):
            if len(message) <= INLINE_BYTES:
                self.stage_record(PICKLE, message)
                return
            message = encode(Pickled(message, ()))
        if message.size_bytes <= INLINE_BYTES:
            message.copy_into(self.board, self.at + 8)
            self.words[self.at >> 3] = message.size_bytes << 8 | MESSAGE
        else:
            self.stage_in_slot(message)

    def stage_record(self, kind: int, payload: bytes) -> None:
        """`stage` for a record of another kind; at most `INLINE_BYTES`."""
        start = self.at + 8
        self.board[start : start + len(payload)] = payload
        self.words[self.at >> 3] = len(payload) << 8 | kind

    def stage_in_slot(self, message: Encoded, kind: int = SLOT_MESSAGE) -> int:
        """`stage` into a slot, whatever the length; returns the slot."""
        slot, offset, capacity, memory = self._take_slot(message.size_bytes)
        try:
            message.copy_into(memory)
        except BaseException:
            self._slots.put_back(slot)
            raise
        self.stage_reserved((slot, offset, capacity), message.size_bytes, kind)
        return slot

    def _try_stage_array(self, array: Any) -> bool:
        """`stage` for a numpy array by itself, without making a message. False for one that pickle has to take care of."""
        if array.dtype is not self._dtype or array.shape != self._shape or not array.flags.c_contiguous:
            described = array_codec().describe(array)
            if described is None or len(described) > RECORD_BYTES - DESCRIPTION_AT:
                return False
            self._dtype, self._shape, self._description = array.dtype, array.shape, described
        description = self._description
        size, start = array.nbytes, self.at + DESCRIPTION_AT
        data_at = start + len(description)
        self.words[(self.at >> 3) + 4] = len(description)
        self.board[start:data_at] = description
        if data_at + size <= self.at + RECORD_BYTES:
            self.board[data_at : data_at + size] = array
            self.words[self.at >> 3] = size << 8 | ARRAY
            return True
        num_bytes = self._num_bytes
        slot, offset, capacity, memory = self._take_slot(size)
        try:
            # Before the copy: it drives all else out of the core's caches, and what is touched behind it has to come back.
            self.stage_reserved((slot, offset, capacity), size, SLOT_ARRAY)
            copy_bytes(memory, 0, array, size)
        except BaseException:
            self._num_bytes = num_bytes
            self._slots.put_back(slot)
            raise
        return True

    def _take_slot(self, size: int) -> tuple[int, int, int, mmap.mmap]:
        try:
            return self._slots.take(size)
        except LookupError:
            self.raise_if_ended()  # another thread has closed it meanwhile
            raise

    def reserve(self, size: int) -> tuple[tuple[int, int, int], memoryview]:
        """A slot, and its memory, for an owner that fills it bit by bit and then calls `stage_reserved`."""
        slot, offset, capacity, memory = self._slots.take(size)
        return (slot, offset, capacity), memoryview(memory)

    def stage_reserved(self, place: tuple[int, int, int], size: int, kind: int) -> None:
        """`stage` for what lies in a slot already: names it in the record."""
        word = self.at >> 3
        self.words[word + 1], self.words[word + 2], self.words[word + 3] = place
        self.words[word] = size << 8 | kind
        self._num_bytes += size

    def take_room(self) -> bool:
        """Takes the room of one record, for an owner that counts by itself, and may take that of several before it fills them.
        False if there is none now: the readers ring when there is.
        """
        if not self.has_room():
            return False
        self._num_missing = len(self._credits)
        return True

    def replace(self, at: int, data: bytes) -> None:
        """Puts a pickle of at most `INLINE_BYTES` into the place of a record that readers may have seen."""
        self.words[at >> 3] = REPLACED
        self._fence()
        self.board[at + 8 : at + 8 + len(data)] = data
        self.words[at >> 3] = len(data) << 8 | PICKLE

    def publish(self) -> None:
        """Gives what is staged to the readers. Cannot fail."""
        at = self.at + RECORD_BYTES
        self.at = self._first if at == self._end else at
        self._num_missing = len(self._credits)
        self.num_values += 1
        if self.is_wanting:
            self._state[WANTED] = 0
            self.is_wanting = False
        for post, flags, ring in self.posts:
            post()
            if FENCE_AFTER_POST:
                self._fence()
            if flags[0]:
                ring()

    def try_flush(self) -> bool:
        """Always: an accepted value lies in memory that the readers see."""
        return True

    def end(self) -> None:
        """Once nothing is written any more: the readers hear that no more values come."""
        self.tell_closed(WRITER_GONE, self._bells)

    def leave(self) -> None:
        """The part of `close` that the readers see, for owners that set `is_closed` before."""
        if not self._has_left:
            self._has_left = True
            self.end()
        self._slots.close()

    def close(self) -> None:
        self.is_closed = True
        self.leave()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(
            self.num_values, self._num_bytes, num_slots=self._slots.num_slots, slot_bytes=self._slots.size_bytes
        )


class CheckedWriter(ShmWriter):
    """A `ShmWriter` whose values may come from tensors that others put into this process's devices: it looks whether all of those
    live before it gives a value away (`crossfade.engines.device_ends.DeviceEnds.distrust` says why).

    ``distrust`` says why values cannot be trusted, if so; it must not wait.
    """

    def __init__(
        self,
        name: str,
        block: RingBlock,
        heap: Heap,
        bells: Sequence[Bell],
        *,
        distrust: Callable[[], CrossfadeError | None],
        buffer_bytes: int = 0,
    ) -> None:
        super().__init__(name, block, heap, bells, buffer_bytes=buffer_bytes)
        self._distrust = distrust

    def try_write(self, value: object) -> bool:
        """Raises a `ChannelBroken` if a party is dead whose tensors may be in the value, so that it may be made of rubbish."""
        if (error := self._distrust()) is not None:
            self.break_off(str(error))
        return super().try_write(value)
