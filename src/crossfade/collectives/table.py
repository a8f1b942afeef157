"""The rendezvous table: in shared memory, each party publishes messages to all others before they do something together.

Each party has a *part*, memory that it writes and all others read:

    key | num_messages | end | is_done | is_waiting | wake | signals (for movers that use some) | records | long texts

A party's messages are its own sequence: message n is in record n % num_slots. `num_messages` is stored last, with a fence before
it, so a process that sees it sees the messages, and one that learns of it from a third party sees it too. Therefore there is one
counter for all readers, and not a semaphore for each, which could be posted to one reader and not yet to another.

Readers do not acknowledge messages. A party publishes its second message about a collective only after all others have published
their first, and its third only after all have published their second; so they had read the first. With ``num_slots`` of two for
each collective that may be under way no record is rewritten before all parties have read it.

A text that is too long for its record is written behind the records, at an offset that belongs to the slot; the file is sparse,
so only written pages take memory. System calls write and read it, so it needs no mapping.

**Several hosts.** Nobody has a part of another host mapped. There all have copies of all parts but their own: what a party changes
in its part it tells the others (``tell``), each of whom changes its copy (`RendezvousTable.hear`). The order of one party's
changes is kept, and that is all that the above needs.

A thread that wants to be woken sets `is_waiting`, then a fence, then looks once more; a publisher (after a fence) reads
`is_waiting` and posts `wake`.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from crossfade.errors import ChannelError
from crossfade.host.memory import PAGE_BYTES, Memory, align
from crossfade.host.semaphore import full_fence, init_semaphore, open_semaphore

RECORD_BYTES = 512
_LONG_BYTES = 1 << 30
_HEAD = struct.Struct("<qqq")
_INLINE_BYTES = RECORD_BYTES - _HEAD.size
_CELL = 8  # words from one counter to the next: a cache line
_NUM_MESSAGES, _END, _IS_DONE, _IS_WAITING, _WAKE = (_CELL * k for k in range(1, 6))
_WORD_BYTES = 8
_NEWS = struct.Struct("<?Bqq")
"""What a party tells of its part: whether it is done, its end, and of a new message its status and number; then the text."""
_NO_MESSAGE = -1


class Status(IntEnum):
    """The subject of a message."""

    OFFER = 0
    COMPLAINT = 1


class End(IntEnum):
    """Whether a party has left."""

    NO = 0
    ENDED = 1  # left; its earlier offers stand
    GIVEN_UP = 2  # left; its offers are void


class Message(NamedTuple):
    """What one party publishes about collective ``number``: the layout of its tensors, or why it has none."""

    status: int
    number: int
    text: bytes


class Wake:
    """A semaphore on which a thread of a party sleeps; keeps its memory alive while another thread may post it."""

    def __init__(self, memory: memoryview | None = None, offset: int = 0) -> None:
        self._memory = memory
        self.address = 0 if memory is None else ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        self._semaphore = open_semaphore(self.address) if memory is not None else None

    def post(self) -> None:
        """Wakes the thread."""
        if self._semaphore is not None:
            self._semaphore.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleeps until it is posted, or the time has passed."""
        if self._semaphore is not None:
            self._semaphore.acquire(True, timeout_s)


def part_bytes(signal_bytes: int, num_slots: int) -> int:
    """The size of one party's part, without its long texts."""
    return PAGE_BYTES + align(signal_bytes, PAGE_BYTES) + align(num_slots * RECORD_BYTES, PAGE_BYTES)


class _Word:
    """One word of a part's first page."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, part: Part, owner: type) -> int:
        return part._words[self._index]

    def __set__(self, part: Part, value: int) -> None:
        part._words[self._index] = value


class Part:
    """One party's part, as one process has it mapped. Owns the memory, of at least `part_bytes`; signals are at `SIGNALS_AT`."""

    KEY_AT, KEY_BYTES = 0, 16
    SIGNALS_AT = PAGE_BYTES

    num_messages = _Word(_NUM_MESSAGES)
    end = _Word(_END)
    is_done = _Word(_IS_DONE)  # the party will not touch the others' memory any more
    is_waiting = _Word(_IS_WAITING)  # a thread of the party wants to be woken by the next message

    def __init__(self, memory: Memory, signal_bytes: int, num_slots: int) -> None:
        size_bytes = part_bytes(signal_bytes, num_slots)
        self.memory = memory
        self._bytes = memoryview(memory.map(size_bytes))
        self._words = self._bytes[:PAGE_BYTES].cast("Q")
        self._num_slots = num_slots
        self._records_at = PAGE_BYTES + align(signal_bytes, PAGE_BYTES)
        self._long_at = align(size_bytes, _LONG_BYTES)
        self.wake = Wake(self._bytes, _WAKE * _WORD_BYTES)

    @classmethod
    def create(cls, label: str, key: bytes, signal_bytes: int, num_slots: int) -> Part:
        """A new part, for its party."""
        part = cls(Memory.create(label, part_bytes(signal_bytes, num_slots)), signal_bytes, num_slots)
        init_semaphore(part.wake.address, 0)
        part._bytes[cls.KEY_AT : cls.KEY_AT + cls.KEY_BYTES] = key
        return part

    @property
    def key(self) -> bytes:
        """The random bytes with which it was created."""
        return bytes(self._bytes[self.KEY_AT : self.KEY_AT + self.KEY_BYTES])

    def write(self, number: int, message: Message) -> None:
        """Writes message ``number``, which no other party can see yet."""
        text = message.text
        slot = number % self._num_slots
        at = self._records_at + slot * RECORD_BYTES
        _HEAD.pack_into(self._bytes, at, message.status, message.number, len(text))
        if len(text) <= _INLINE_BYTES:
            self._bytes[at + _HEAD.size : at + _HEAD.size + len(text)] = text
            return
        if len(text) > _LONG_BYTES:
            raise ChannelError(
                f"a text of {len(text)} bytes is too long for a message", hint="raise a smaller exception"
            )
        view, place = memoryview(text), self._long_at + slot * _LONG_BYTES
        while view:
            num_written = os.pwrite(self.memory.fd, view, place)
            view, place = view[num_written:], place + num_written

    def read(self, number: int) -> Message:
        """Message ``number``, which was published."""
        slot = number % self._num_slots
        at = self._records_at + slot * RECORD_BYTES
        status, subject, length = _HEAD.unpack_from(self._bytes, at)
        if length <= _INLINE_BYTES:
            return Message(status, subject, bytes(self._bytes[at + _HEAD.size : at + _HEAD.size + length]))
        text, place = bytearray(), self._long_at + slot * _LONG_BYTES
        while len(text) < length and (piece := os.pread(self.memory.fd, length - len(text), place + len(text))):
            text += piece
        return Message(status, subject, bytes(text))

    def close(self) -> None:
        """Unmaps it: from now on it has no messages. Other threads may read or wake meanwhile. Idempotent."""
        self.memory.close()
        self._bytes = memoryview(bytearray(PAGE_BYTES))
        self._words = self._bytes.cast("Q")
        self.wake = Wake()


class RendezvousTable:
    """All parts, by rank, as the party of one rank has them. ``fence`` is a full memory fence; ``tell`` tells the others what
    changes, where their processes do not see this party's part.
    """

    def __init__(self, parts: Sequence[Part], rank: int, tell: Callable[[bytes], None] | None = None) -> None:
        self.parts = tuple(parts)
        self.own = parts[rank]
        self.others = tuple(part for part in parts if part is not self.own)
        self.fence = full_fence()
        self._tell = tell

    def publish(self, message: Message) -> int:
        """Publishes it to all and wakes those who wait; returns its place in this party's sequence."""
        own, number = self.own, self.own.num_messages
        own.write(number, message)
        self.fence()
        own.num_messages = number + 1
        self.fence()
        if self._tell is not None:
            self._tell(_NEWS.pack(False, own.end, message.status, message.number) + message.text)
            return number
        for part in self.others:
            if part.is_waiting:
                part.wake.post()
        return number

    def hear(self, rank: int, news: bytes) -> None:
        """A party of another host has told of its part. One thread for each party calls it."""
        part = self.parts[rank]
        is_done, end, status, number = _NEWS.unpack_from(news)
        if number != _NO_MESSAGE:
            part.write(part.num_messages, Message(status, number, news[_NEWS.size :]))
            self.fence()
            part.num_messages += 1
        self.fence()
        part.end, part.is_done = max(part.end, end), part.is_done or is_done
        self.fence()
        if self.own.is_waiting or number == _NO_MESSAGE:
            self.own.wake.post()

    def has_all(self, number: int) -> bool:
        """Whether all others have published message ``number``."""
        for part in self.others:
            if part.num_messages <= number:
                return False
        self.fence()
        return True

    def read_all(self, number: int) -> list[Message]:
        """Message ``number`` of each party, by rank; `has_all` was true."""
        return [part.read(number) for part in self.parts]

    def has_ended(self) -> bool:
        """Whether another party has left."""
        return any(part.end for part in self.others)

    def has_given_up(self) -> bool:
        """Whether another party's offers are void."""
        return any(part.end == End.GIVEN_UP for part in self.others)

    def is_over(self, number: int) -> bool:
        """Whether another party has left before its message ``number``."""
        ended = [part for part in self.others if part.end]
        self.fence()  # after its end the counter does not move
        return any(part.num_messages <= number for part in ended)

    def await_some(self, is_waiting: bool) -> None:
        """Asks the others to post this party's `wake` with each message, or not to. Look for messages once more afterwards."""
        self.own.is_waiting = is_waiting
        self.fence()

    def end(self) -> None:
        """Leaves: no message follows."""
        self.fence()
        self.own.end = self.own.end or End.ENDED
        self._wake_others()

    def give_up(self) -> None:
        """Leaves, and makes this party's offers void."""
        self.fence()
        self.own.end = End.GIVEN_UP
        self._wake_others()

    def finish(self) -> None:
        """Declares that this party does not touch the others' memory any more."""
        self.fence()
        self.own.is_done = True
        self._wake_others()

    def unfinished(self, names: Sequence[str]) -> list[str]:
        """The names, given by rank, of the parties that have not finished."""
        return [name for name, part in zip(names, self.parts, strict=True) if not part.is_done]

    def _wake_others(self) -> None:
        self.fence()
        if self._tell is not None:
            self._tell(_NEWS.pack(bool(self.own.is_done), self.own.end, 0, _NO_MESSAGE))
            return
        for part in self.others:
            part.wake.post()

    def close(self) -> None:
        """Closes all parts. Idempotent."""
        for part in self.parts:
            part.close()
