"""Short messages from one process to another, in shared memory: a mailbox, and what waits for room in it.

One semaphore counts the letters, another one the room, so each letter is seen whole by whoever took its post.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from crossfade.host.memory import address_of
from crossfade.host.semaphore import SEMAPHORE_BYTES, Semaphore, init_semaphore, open_semaphore


class MailboxShape(NamedTuple):
    """How large a mailbox is; the same on both sides."""

    num_letters: int
    letter_bytes: int  # of the longest letter and its length, at most 256

    @property
    def size_bytes(self) -> int:
        return 2 * SEMAPHORE_BYTES + self.num_letters * self.letter_bytes

    def format(self, address: int) -> None:
        """Makes zeroed memory a mailbox. Done once, before either side opens it."""
        init_semaphore(address, 0)
        init_semaphore(address + SEMAPHORE_BYTES, self.num_letters)


class Mailbox:
    """Letters on their way in one direction. Each end is used by one thread at a time."""

    def __init__(self, board: mmap.mmap, offset: int, shape: MailboxShape) -> None:
        base = address_of(board, offset)
        self._board = board  # semaphores point into it
        self._shape = shape
        self._letters: Semaphore = open_semaphore(base)
        self._room: Semaphore = open_semaphore(base + SEMAPHORE_BYTES)
        self._first = offset + 2 * SEMAPHORE_BYTES
        self._next = 0

    def _place(self) -> int:
        number, self._next = self._next, (self._next + 1) % self._shape.num_letters
        return self._first + number * self._shape.letter_bytes

    def try_put(self, data: bytes) -> bool:
        """Puts a letter in; False if there is no room."""
        if not self._room.acquire(False):
            return False
        at = self._place()
        self._board[at] = len(data)
        self._board[at + 1 : at + 1 + len(data)] = data
        self._letters.release()
        return True

    def has_letters(self) -> bool:
        """Whether there is one to take."""
        return not self._letters._is_zero()

    def take(self) -> bytes | None:
        """The next letter; None if there is none."""
        if not self._letters.acquire(False):
            return None
        at = self._place()
        data = self._board[at + 1 : at + 1 + self._board[at]]
        self._room.release()
        return data


class Outbox:
    """Puts letters into a mailbox, as room allows, and wakes the other process. One thread at a time uses it."""

    def __init__(self, mailbox: Mailbox, wake: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._wake = wake
        self._unsent: deque[bytes] = deque()

    def put(self, data: bytes) -> None:
        """Sends it, now or with a later call of anything here."""
        self._unsent.append(data)
        self.flush()

    def flush(self) -> bool:
        """Sends what there is room for; whether that was all."""
        has_sent = False
        while self._unsent and self._mailbox.try_put(self._unsent[0]):
            self._unsent.popleft()
            has_sent = True
        if has_sent:
            self._wake()
        return not self._unsent

    def drop(self) -> None:
        """The other side is gone."""
        self._unsent.clear()
