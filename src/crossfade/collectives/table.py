"""What several parties say to each other before they do something together: a round table in shared memory.

Each party has a *part*, memory that it writes and all others read:

    key | num_said | end | is_done | is_waiting | wake | signals (for whoever asks for some) | records | long texts

A party's records are its own sequence, record number n in slot n % num_slots. `num_said` is stored last, with a fence before it, so
whoever sees it sees the records, and whoever hears of it from a third party sees it too. That is what one counter for all
readers is for, where a semaphore for each could be posted to one and not yet to another.

Nobody says that a record was read. A party says something the second time about a collective only after all others have said
theirs the first time, and the third time only after all have said theirs the second time; so they had read the first. With
``num_slots`` of two for each collective that may be under way no slot is rewritten before everybody has read it.

A text that is too long for its record lies behind the records, in a piece of addresses that the slot has for itself; pages are
taken where something is written. It is written and read by system calls, so it needs no mapping.

A thread that wants to be woken says so (`is_waiting`, then a fence, then one more look); who has said something (then a fence)
looks there and posts `wake`.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from crossfade.errors import ChannelError
from crossfade.host.memory import PAGE_BYTES, Memory, align
from crossfade.host.semaphore import full_fence, init_semaphore, open_semaphore

__all__ = ["RECORD_BYTES", "End", "Part", "Said", "Status", "Table", "part_bytes"]

RECORD_BYTES = 512
_LONG_BYTES = 1 << 30
_HEAD = struct.Struct("<qqq")
_INLINE_BYTES = RECORD_BYTES - _HEAD.size
_CELL = 8  # words from one counter to the next: a cache line
_KEY, _NUM_SAID, _END, _IS_DONE, _IS_WAITING, _WAKE = (_CELL * k for k in range(6))
_WORD_BYTES = 8


class Status(IntEnum):
    """What a record is about."""

    OFFER = 0
    COMPLAINT = 1


class End(IntEnum):
    """Whether a party says anything more."""

    NO = 0
    ENDED = 1
    """No; what it has said still holds."""
    GIVEN_UP = 2
    """No, and what it has said does not hold."""


class Said(NamedTuple):
    """What one party said.

    Attributes:
        status: whether it can take part.
        number: of the collective that it means.
        text: its layout, or why not.
    """

    status: int
    number: int
    text: bytes


class Wake:
    """What a thread of a party sleeps on; holds the memory in which it lies, for it may be posted while that is given back.

    Args:
        memory: in which it lies; None for one that nobody sleeps on.
        offset: where.
    """

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


class Part:
    """One party's part, as one process has it.

    Args:
        memory: at least `part_bytes` long; owned by this object from now on.
        signal_bytes: room for signals; they begin at `SIGNALS_AT`.
        num_slots: records that it keeps.

    Attributes:
        wake: wakes a thread of the party.
    """

    SIGNALS_AT = PAGE_BYTES

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
    def create(cls, label: str, key: int, signal_bytes: int, num_slots: int) -> Part:
        """A new one, for its party."""
        part = cls(Memory.create(label, part_bytes(signal_bytes, num_slots)), signal_bytes, num_slots)
        init_semaphore(part.wake.address, 0)
        part._words[_KEY] = key
        return part

    @property
    def key(self) -> int:
        """What it was created with."""
        return self._words[_KEY]

    @property
    def num_said(self) -> int:
        """Records so far."""
        return self._words[_NUM_SAID]

    @num_said.setter
    def num_said(self, number: int) -> None:
        self._words[_NUM_SAID] = number

    @property
    def end(self) -> End:
        """Whether, and how, the party has ended."""
        return End(self._words[_END])

    @end.setter
    def end(self, value: End) -> None:
        self._words[_END] = value

    @property
    def is_done(self) -> bool:
        """Whether the party will not touch the others' memory any more."""
        return bool(self._words[_IS_DONE])

    @is_done.setter
    def is_done(self, value: bool) -> None:
        self._words[_IS_DONE] = value

    @property
    def is_waiting(self) -> bool:
        """Whether a thread of the party wants to be woken when something is said."""
        return bool(self._words[_IS_WAITING])

    @is_waiting.setter
    def is_waiting(self, value: bool) -> None:
        self._words[_IS_WAITING] = value

    def write(self, number: int, said: Said) -> None:
        """Writes record ``number``, which nobody can see yet."""
        text = said.text
        slot = number % self._num_slots
        at = self._records_at + slot * RECORD_BYTES
        _HEAD.pack_into(self._bytes, at, said.status, said.number, len(text))
        if len(text) <= _INLINE_BYTES:
            self._bytes[at + _HEAD.size : at + _HEAD.size + len(text)] = text
            return
        if len(text) > _LONG_BYTES:
            raise ChannelError(f"a text of {len(text)} bytes is too long to be told", hint="raise a smaller exception")
        view, place = memoryview(text), self._long_at + slot * _LONG_BYTES
        while view:
            num_written = os.pwrite(self.memory.fd, view, place)
            view, place = view[num_written:], place + num_written

    def read(self, number: int) -> Said:
        """Record ``number``, which was said."""
        slot = number % self._num_slots
        at = self._records_at + slot * RECORD_BYTES
        status, meant, length = _HEAD.unpack_from(self._bytes, at)
        if length <= _INLINE_BYTES:
            return Said(status, meant, bytes(self._bytes[at + _HEAD.size : at + _HEAD.size + length]))
        text, place = bytearray(), self._long_at + slot * _LONG_BYTES
        while len(text) < length and (piece := os.pread(self.memory.fd, length - len(text), place + len(text))):
            text += piece
        return Said(status, meant, bytes(text))

    def close(self) -> None:
        """Lets go of it: from now on nobody has said anything. Other threads may look, or wake, meanwhile. Idempotent."""
        self.memory.close()
        self._bytes = memoryview(bytearray(PAGE_BYTES))
        self._words = self._bytes.cast("Q")
        self.wake = Wake()


class Table:
    """All parts, as one party has them.

    Args:
        parts: by rank.
        rank: whose table it is.

    Attributes:
        parts: by rank.
        own: this party's.
        others: all but this one's.
        fence: a full memory fence.
    """

    def __init__(self, parts: Sequence[Part], rank: int) -> None:
        self.parts = tuple(parts)
        self.own = parts[rank]
        self.others = tuple(part for part in parts if part is not self.own)
        self.fence = full_fence()

    def say(self, said: Said) -> int:
        """Says it to all, and wakes who waits; gives its number."""
        own, number = self.own, self.own.num_said
        own.write(number, said)
        self.fence()
        own.num_said = number + 1
        self.fence()
        for part in self.others:
            if part.is_waiting:
                part.wake.post()
        return number

    def has_all(self, number: int) -> bool:
        """Whether all others have said so many and one."""
        for part in self.others:
            if part.num_said <= number:
                return False
        self.fence()
        return True

    def read_all(self, number: int) -> list[Said]:
        """What everybody said, by rank; `has_all` was true."""
        return [part.read(number) for part in self.parts]

    def has_ended(self) -> bool:
        """Whether somebody says nothing more."""
        return any(part.end for part in self.others)

    def has_given_up(self) -> bool:
        """Whether what somebody has said does not hold."""
        return any(part.end == End.GIVEN_UP for part in self.others)

    def is_over(self, number: int) -> bool:
        """Whether somebody has ended who had not said so many and one."""
        ended = [part for part in self.others if part.end]
        self.fence()  # after its end the counter does not move
        return any(part.num_said <= number for part in ended)

    def await_some(self, is_waiting: bool) -> None:
        """This party wants, or does not want any more, its `wake` to be posted when something is said; look once more after."""
        self.own.is_waiting = is_waiting
        self.fence()

    def end(self) -> None:
        """Says to all that nothing more comes."""
        self.fence()
        self.own.end = self.own.end or End.ENDED
        self._tell()

    def give_up(self) -> None:
        """Says to all that what this party has said does not hold."""
        self.fence()
        self.own.end = End.GIVEN_UP
        self._tell()

    def finish(self) -> None:
        """Says to all that this party does not touch their memory any more."""
        self.fence()
        self.own.is_done = True
        self._tell()

    def unfinished(self, names: Sequence[str]) -> list[str]:
        """The names, given by rank, of those who have not said that."""
        return [name for name, part in zip(names, self.parts, strict=True) if not part.is_done]

    def _tell(self) -> None:
        self.fence()
        for part in self.others:
            part.wake.post()

    def close(self) -> None:
        """Closes all parts. Idempotent."""
        for part in self.parts:
            part.close()
