"""The memory in which a rank is reached by the others: its letters, its counters, its alarm, and what it waits for.

Each rank makes one and opens those of the others. In a rank's memory::

    page 0     the alarm: a semaphore, whether the rank sleeps; what it waits for, in words (for the time-out errors of all ranks)
    page 1 on  for each rank, its letters to this one: a mailbox, and behind it whether it is sending
    then       for each rank, the counters of this rank's windows towards it: first those of host memory, then those of a GPU's
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from crossfade.device.signals import WORD_BYTES
from crossfade.host.mailbox import Mailbox, MailboxShape, Outbox
from crossfade.host.memory import PAGE_BYTES, Memory, address_of, align
from crossfade.host.semaphore import FENCE_AFTER_POST, full_fence, init_semaphore, open_semaphore
from crossfade.p2p.letters import LETTER_BYTES, Letter, pack, unpack

NUM_WINDOWS = 256
"""Windows of one kind of memory that a rank can have open towards another one."""

_LETTERS = MailboxShape(num_letters=256, letter_bytes=LETTER_BYTES)
_SENDING = align(_LETTERS.size_bytes, 64)
_ROW_BYTES = align(_SENDING + 1, PAGE_BYTES)
_WORDS_BYTES = align(2 * NUM_WINDOWS * WORD_BYTES, PAGE_BYTES)
_ASLEEP, _STATUS, _MOST_STATUS_BYTES = 64, 128, 2048


class BoardLayout:
    """Where things lie in the memory of each of ``num_ranks`` ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._words = PAGE_BYTES + num_ranks * _ROW_BYTES
        self.size_bytes = self._words + 2 * num_ranks * _WORDS_BYTES
        self.letters_bytes = self._words

    def letters_of(self, rank: int) -> int:
        """Where the letters of a rank are put."""
        return PAGE_BYTES + rank * _ROW_BYTES

    def words_for(self, rank: int, *, is_host: bool) -> int:
        """Where the counters of windows towards a rank begin: `NUM_WINDOWS` of ``ready``, then as many of ``done``."""
        return self._words + (2 * rank + (not is_host)) * _WORDS_BYTES


def format_board(memory: Memory, layout: BoardLayout) -> mmap.mmap:
    """Makes new memory a rank's board; gives the part with the alarm and the letters."""
    mapping = memory.map(layout.letters_bytes)
    base = address_of(mapping)
    init_semaphore(base, 0)
    for rank in range(layout.num_ranks):
        _LETTERS.format(base + layout.letters_of(rank))
    return mapping


class Alarm:
    """Wakes a rank that sleeps. No wake-up is lost: see `crossfade.host.doorbell`, whose steps these are, with a semaphore in the
    place of the descriptor, which ranks that are not each other's children cannot hand over.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._semaphore = open_semaphore(address_of(mapping))
        self._fence = full_fence()

    def ring(self) -> None:
        """Wakes the rank if it sleeps. What was posted before is seen by it."""
        if FENCE_AFTER_POST:
            self._fence()
        if self._mapping[_ASLEEP]:
            self._semaphore.release()

    def sleep(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """One sleep of this process, until it is rung or the time is over. True if ``ready()`` was true before it."""
        while self._semaphore.acquire(False):  # rings of earlier sleeps
            pass
        self._mapping[_ASLEEP] = 1
        try:
            self._fence()
            if ready():
                return True
            self._semaphore.acquire(True, timeout_s)
            return False
        finally:
            self._mapping[_ASLEEP] = 0

    @property
    def status(self) -> str:
        """What the rank waits for, in words."""
        length = int.from_bytes(self._mapping[_STATUS : _STATUS + 2], "little")
        return self._mapping[_STATUS + 2 : _STATUS + 2 + length].decode(errors="replace")

    @status.setter
    def status(self, text: str) -> None:
        data = text.encode()[:_MOST_STATUS_BYTES]
        self._mapping[_STATUS + 2 : _STATUS + 2 + len(data)] = data
        self._mapping[_STATUS : _STATUS + 2] = len(data).to_bytes(2, "little")


class SendMark:
    """Whether either rank of a pair is in the middle of a send: between its look for posted receives and its letter.

    A rank that has posted a receive, then sees no mark, and then finds no announcement, knows that the next send with the tag reads
    its letter, and pushes: each side writes before it looks, with a fence in between (which a mailbox's semaphore is).
    """

    def __init__(self, own: mmap.mmap, own_offset: int, theirs: mmap.mmap, their_offset: int) -> None:
        self._own, self._own_place = own, own_offset + _SENDING
        self._theirs, self._their_place = theirs, their_offset + _SENDING
        self._fence = full_fence()

    def begin(self) -> None:
        """This rank is about to look, and then to send."""
        self._theirs[self._their_place] = 1
        self._fence()

    def end(self) -> None:
        """Its letter can be read."""
        if FENCE_AFTER_POST:
            self._fence()
        self._theirs[self._their_place] = 0

    def is_other_sending(self) -> bool:
        """Whether the other rank is between its look and its letter, or may be. Behind this, letters are to be read."""
        if FENCE_AFTER_POST:
            self._fence()
        is_sending = self._own[self._own_place] != 0
        if FENCE_AFTER_POST:
            self._fence()
        return is_sending


class NearLetters:
    """The letters between this rank and another one of this host, whose ``alarm`` is rung (see `crossfade.p2p.carrier.Letters`)."""

    def __init__(self, own: mmap.mmap, own_offset: int, theirs: mmap.mmap, their_offset: int, alarm: Alarm) -> None:
        self._inbox = Mailbox(own, own_offset, _LETTERS)
        self._outbox = Outbox(Mailbox(theirs, their_offset, _LETTERS), alarm.ring)
        self.have_come = self._inbox.has_letters
        self.flush = self._outbox.flush
        self.drop = self._outbox.drop

    def take(self) -> Letter | None:
        data = self._inbox.take()
        return None if data is None else unpack(data)

    def put(self, letter: Letter) -> None:
        self._outbox.put(pack(letter))
