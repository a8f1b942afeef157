"""The shared-memory ring: one writer, any number of readers, on one host.

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
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Sequence

from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.ring_layout import HEAD_BYTES, RECORD_BYTES, RingLayout
from crossfade.channels.slots import ReaderSlots, WriterSlots
from crossfade.channels.values.codec import PLAIN_TYPES, decode, prepare, undecodable
from crossfade.channels.values.layout import Encoded, Pickled, encode
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory, address_of
from crossfade.host.semaphore import FENCE_AFTER_POST, full_fence, open_semaphore

__all__ = ["INLINE_BYTES", "SLOT_MESSAGE", "WRITER_GONE", "ShmReader", "ShmWriter"]

INLINE_BYTES = RECORD_BYTES - 8
WRITER_GONE, _READER_GONE, _WANTED = 0, 1, 2  # bytes at the start of the block; each is set by one side only


# A record starts with the word (size << 8 | kind). Only the last two use a slot; three more words say which.
_PICKLE, _BYTES, _MESSAGE, _SLOT_BYTES, SLOT_MESSAGE = range(1, 6)


class _End:
    """What both ends share."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, name: str, board: mmap.mmap, offset: int, layout: RingLayout, gone: int) -> None:
        self.name = name
        self.layout = layout
        self._board = board  # semaphores point into it
        self._base = address_of(board, offset)
        whole = memoryview(board)
        self._state = whole[offset : offset + HEAD_BYTES]
        self._words = whole.cast("Q")
        self._first = offset + layout.records
        self._end = self._first + layout.depth * RECORD_BYTES
        self._at = self._first  # where the next record lies on the board
        self._fence = full_fence()
        self._gone = gone  # the other side's byte
        self._reason = "the other side closed it"
        self._is_closed = False
        self._num_values = 0
        self._num_bytes = 0

    def break_off(self, reason: str) -> None:
        """See the protocol."""
        self._reason = reason
        self._state[self._gone] = 1

    def _raise_if_ended(self) -> None:
        if self._is_closed:
            raise ChannelClosed(f"channel {self.name} was closed by this side")
        if self._state[self._gone]:
            raise ChannelBroken(f"channel {self.name} is broken: {self._reason}")

    def _close(self, own_byte: int, bells: Sequence[Bell]) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tell_closed(own_byte, bells)

    def _tell_closed(self, own_byte: int, bells: Sequence[Bell]) -> None:
        self._state[own_byte] = 1
        full_fence()()
        for bell in bells:
            bell.ring()


class ShmWriter(_End):
    """The writing end.

    Args:
        name: for errors.
        board, offset, layout: where the ring's block lies.
        heap: the writer's heap; several rings of one writer share it.
        bells: the readers' doorbells, in the order of the readers.
        buffer_bytes: size of ``depth`` slots to set aside now, 0 for none.
    """

    def __init__(
        self,
        name: str,
        board: mmap.mmap,
        offset: int,
        layout: RingLayout,
        heap: Heap,
        bells: Sequence[Bell],
        *,
        buffer_bytes: int = 0,
    ) -> None:
        super().__init__(name, board, offset, layout, _READER_GONE)
        semaphores = [
            (open_semaphore(self._base + layout.items(r)), open_semaphore(self._base + layout.credits(r)))
            for r in range(layout.num_readers)
        ]
        self._credits = [credit.acquire for _, credit in semaphores]
        self._num_missing = len(self._credits)  # credits still to be had for the next record
        self._is_wanting = False
        self._posts = [(item.release, bell.flags, bell.ring) for (item, _), bell in zip(semaphores, bells, strict=True)]
        self._bells = bells
        self._slots = WriterSlots(heap, self._base, layout)
        if buffer_bytes:
            self._slots.set_aside(layout.depth, buffer_bytes)

    def try_write(self, value: object) -> bool:
        """See the protocol."""
        if not self.has_room():
            return False
        data: bytes | Encoded
        type_ = type(value)
        if type_ is bytes:
            data, kind = value, _BYTES  # type: ignore[assignment]
        elif type_ in PLAIN_TYPES:  # as `prepare` would, with a call less
            data, kind = pickle.dumps(value, 5), _PICKLE
        else:
            data, kind = prepare(value), _PICKLE
        if type(data) is bytes and (size := len(data)) <= INLINE_BYTES:
            start = self._at + 8
            self._board[start : start + size] = data
            self._words[self._at >> 3] = size << 8 | kind
        else:
            self._put_large(data, kind)
        self.publish()
        return True

    def has_room(self) -> bool:
        """Whether the next record may be written; if not, the readers ring when that changes.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
        """
        if self._state[_READER_GONE] or self._is_closed:
            self._raise_if_ended()
        while self._num_missing:
            if not self._credits[self._num_missing - 1](False):
                if self._is_wanting:
                    return False
                # A credit that came before this was seen has rung nobody: look once more.
                self.ask_to_be_rung()
                continue
            self._num_missing -= 1
        return True

    def ask_to_be_rung(self) -> None:
        """The readers wake this process from now on when they give anything back; look once more before it sleeps."""
        self._state[_WANTED] = 1
        self._is_wanting = True
        full_fence()()

    def stage(self, message: bytes | Encoded) -> None:
        """Writes a pickle or a message where the next value goes; nobody sees it before `publish`. There must be room.

        Raises:
            Exception: there is no memory for it; nothing was written then.
        """
        if isinstance(message, bytes):
            if len(message) <= INLINE_BYTES:
                self._put_pickle(self._at, message)
                return
            message = encode(Pickled(message, ()))
        if message.size_bytes <= INLINE_BYTES:
            message.copy_into(memoryview(self._board)[self._at + 8 : self._at + RECORD_BYTES])
            self._words[self._at >> 3] = message.size_bytes << 8 | _MESSAGE
        else:
            self._put_in_slot(SLOT_MESSAGE, message)

    def _put_pickle(self, at: int, data: bytes) -> None:
        """Writes a pickle of at most `INLINE_BYTES` into the record at ``at``."""
        self._board[at + 8 : at + 8 + len(data)] = data
        self._words[at >> 3] = len(data) << 8 | _PICKLE

    def stage_record(self, kind: int, payload: bytes) -> None:
        """`stage` for what a subclass's reader understands; at most `INLINE_BYTES`."""
        start = self._at + 8
        self._board[start : start + len(payload)] = payload
        self._words[self._at >> 3] = len(payload) << 8 | kind

    def publish(self) -> None:
        """Gives what is staged to the readers. Cannot fail."""
        at = self._at + RECORD_BYTES
        self._at = self._first if at == self._end else at
        self._num_missing = len(self._credits)
        self._num_values += 1
        if self._is_wanting:
            self._state[_WANTED] = 0
            self._is_wanting = False
        for post, flags, ring in self._posts:
            post()
            if FENCE_AFTER_POST:
                self._fence()
            if flags[0]:
                ring()

    def _put_large(self, data: bytes | Encoded, kind: int) -> None:
        """Writes what is not one small piece."""
        if kind == _BYTES and isinstance(data, bytes):
            self._put_in_slot(_SLOT_BYTES, Encoded(data, (), len(data)))
        else:
            self.stage(data)

    def _put_in_slot(self, kind: int, message: Encoded) -> int:
        """Writes a message into a slot and names it in the record; which slot it is."""
        try:
            slot, offset, capacity, view = self._slots.take(message.size_bytes)
        except LookupError:
            self._raise_if_ended()  # another thread has closed it meanwhile
            raise
        try:
            message.copy_into(view)
        except BaseException:
            self._slots.put_back(slot)
            raise
        word = self._at >> 3
        self._words[word + 1], self._words[word + 2], self._words[word + 3] = slot, offset, capacity
        self._words[word] = message.size_bytes << 8 | kind
        self._num_bytes += message.size_bytes
        return slot

    def try_flush(self) -> bool:
        """Always: an accepted value lies in memory that the readers see."""
        return True

    def end(self) -> None:
        """Once nothing is written any more: the readers hear that no more values come."""
        self._tell_closed(WRITER_GONE, self._bells)

    def close(self) -> None:
        """See the protocol."""
        self._close(WRITER_GONE, self._bells)
        self._slots.close()

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        return ChannelStatistics(
            self._num_values, self._num_bytes, num_slots=self._slots.num_slots, slot_bytes=self._slots.size_bytes
        )


class ShmReader(_End):
    """One reading end.

    Args:
        name: for errors.
        board, offset, layout: where the ring's block lies.
        index: which of the readers this is.
        heap_memory: the writer's heap.
        bell: the writer's doorbell.
    """

    def __init__(
        self, name: str, board: mmap.mmap, offset: int, layout: RingLayout, index: int, heap_memory: Memory, bell: Bell
    ) -> None:
        super().__init__(name, board, offset, layout, WRITER_GONE)
        items = open_semaphore(self._base + layout.items(index))
        self._take, self._put_back = items.acquire, items.release
        self.is_idle = items._is_zero  # a method of the interpreter's own: no Python frame in a spinning loop
        self._post_credit = open_semaphore(self._base + layout.credits(index)).release
        self._bell = bell
        self._bell_flags, self._ring = bell.flags, bell.ring
        self._slots = ReaderSlots(heap_memory, board, self._base, layout)
        self._shares = layout.num_readers > 1
        self._num_copied_out = 0

    def try_start(self) -> bool:
        """Nothing to start: values come by themselves."""
        return True

    def try_read(self) -> object:
        """See the protocol."""
        if not self._take(False):
            if not (self._state[WRITER_GONE] or self._is_closed):
                return EMPTY
            if self._is_closed or not self._take(False):  # a value may have come before the end did
                self._raise_if_ended()
                return EMPTY
        at = self._at
        word = self._words[at >> 3]
        kind, size = word & 255, word >> 8
        try:
            if kind == _PICKLE:
                value = pickle.loads(self._board[at + 8 : at + 8 + min(size, INLINE_BYTES)])
            elif kind == _BYTES:
                value = self._board[at + 8 : at + 8 + min(size, INLINE_BYTES)]
            else:
                value = self._read_message(at, kind, size)
        except ChannelError:
            raise
        except Exception as error:
            if self._is_closed:
                self._raise_if_ended()  # another thread has closed it meanwhile
            value = undecodable(error, self.name)
        if value is EMPTY:  # a subclass has seen the record, and has put it back
            return EMPTY
        at += RECORD_BYTES
        self._at = self._first if at == self._end else at
        self._num_values += 1
        self._post_credit()
        if FENCE_AFTER_POST:
            self._fence()
        if self._state[_WANTED] and self._bell_flags[0]:
            self._ring()
        return value

    def nudge(self) -> Callable[[], None]:
        """What wakes the writer, if it waits for something of this side that was posted before. It outlives this end."""
        state, bell, fence = self._state, self._bell, self._fence

        def nudge() -> None:
            if FENCE_AFTER_POST:
                fence()
            if state[_WANTED] and bell.flags[0]:
                bell.ring()

        return nudge

    def _read_message(self, at: int, kind: int, size: int) -> object:
        if kind == _MESSAGE:
            return self._decode_copy(bytearray(self._board[at + 8 : at + 8 + min(size, INLINE_BYTES)]))
        word = at >> 3
        slot, offset, capacity = self._words[word + 1 : word + 4]
        if kind not in (_SLOT_BYTES, SLOT_MESSAGE) or slot >= self.layout.num_slots or size > capacity:
            raise ValueError(
                f"a record of channel {self.name} is damaged: kind {kind}, slot {slot}, {size} of {capacity} bytes"
            )
        self._num_bytes += size
        if kind == _SLOT_BYTES:
            return self._slots.copied(bytes, slot, offset, capacity, size)
        if self._slots.num_kept >= self.layout.depth:
            self._num_copied_out += 1
            return self._decode_copy(self._slots.copied(bytearray, slot, offset, capacity, size))
        return self._decode_view(slot, self._slots.view(slot, offset, capacity, size))

    def _decode_view(self, slot: int, view: memoryview) -> object:
        """The value of a message in a slot."""
        return self._decode(view, bytearray if self._shares else _itself)

    def _decode_copy(self, message: bytearray) -> object:
        """The value of a message that belongs to nobody else."""
        return self._decode(memoryview(message), _itself)

    def _decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        return decode(message, private=private, shared=memoryview.toreadonly)

    def release(self) -> None:
        """Nothing to do: a slot is free when its last view dies."""

    def close(self) -> None:
        """See the protocol."""
        self._close(_READER_GONE, (self._bell,))
        self._slots.close()

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        return ChannelStatistics(
            self._num_values,
            self._num_bytes,
            num_copied_out=self._num_copied_out,
            num_kept=self._slots.num_kept,
        )


def _itself(view: memoryview) -> memoryview:
    return view
