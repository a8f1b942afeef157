"""Where the lanes of a channel lie on the board, behind its ring (``edges.by_copies``, ``edges.by_staging``).

Each lane has a block: two mailboxes, a semaphore for each slot that can ever be offered, one for what was told ahead, and how far
its writer is (`crossfade.edges.turns`).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import NamedTuple

from crossfade.device.records import Record, pack, unpack
from crossfade.device.ring import NUM_GROUPS, num_signals
from crossfade.device.signals import WORD_BYTES
from crossfade.edges.turns import PROGRESS_BYTES
from crossfade.host.memory import address_of, align
from crossfade.host.semaphore import SEMAPHORE_BYTES, Semaphore, init_semaphore, open_semaphore

__all__ = ["DeviceLayout", "Lanes", "Mailbox", "format_lanes"]

_NUM_LETTERS = 16
_LETTER_BYTES = 128
_MAILBOX_BYTES = 2 * SEMAPHORE_BYTES + _NUM_LETTERS * _LETTER_BYTES


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Where the lanes of a channel lie."""

    num_readers: int
    num_sources: int  # devices of the writer; a lane goes from each of them to each reader
    num_slots: int  # slots of each lane

    @property
    def num_lanes(self) -> int:
        """Lane ``reader * num_sources + source`` goes from that device of the writer to that reader."""
        return self.num_readers * self.num_sources

    def to_reader(self, lane: int) -> int:
        """Offset of the mailbox of what the writer tells."""
        return lane * self._lane_bytes

    def to_writer(self, lane: int) -> int:
        """Offset of the mailbox of what the reader tells."""
        return self.to_reader(lane) + _MAILBOX_BYTES

    def freed(self, lane: int, group: int, slot: int) -> int:
        """Offset of the semaphore that the reader posts when it has enqueued ``free`` of a slot."""
        return self.to_writer(lane) + _MAILBOX_BYTES + (group * self.num_slots + slot) * SEMAPHORE_BYTES

    def enqueued(self, lane: int) -> int:
        """Offset of the semaphore that the writer posts when it has enqueued what a record told beforehand (`TENSOR_AHEAD`)."""
        return self.freed(lane, NUM_GROUPS, 0)

    def progress(self, lane: int) -> int:
        """Offset of where the writer says how far it is."""
        return self.to_reader(lane + 1) - PROGRESS_BYTES

    @property
    def _lane_bytes(self) -> int:
        num_semaphores = NUM_GROUPS * self.num_slots + 1
        return align(2 * _MAILBOX_BYTES + num_semaphores * SEMAPHORE_BYTES, 64) + PROGRESS_BYTES

    @property
    def size_bytes(self) -> int:
        """Length of all lanes' blocks."""
        return self.num_lanes * self._lane_bytes

    @property
    def num_signals(self) -> int:
        """Signals that all lanes need; each has its share, one behind the other."""
        return self.num_lanes * self.signals_per_lane

    @property
    def signals_bytes(self) -> int:
        """Memory that all signals need."""
        return self.num_signals * WORD_BYTES

    @property
    def signals_per_lane(self) -> int:
        """Signals of one lane: those of its ring, and the counter of its pushes."""
        return num_signals(self.num_slots) + 1

    def pushed(self, lane: int) -> int:
        """Which of the signals counts the pushes of a lane."""
        return lane * self.signals_per_lane + num_signals(self.num_slots)


class Lanes(NamedTuple):
    """Where the lanes of a channel lie: the mapped board, the offset in bytes of their blocks, the layout."""

    board: mmap.mmap
    offset: int
    layout: DeviceLayout


def format_lanes(board: mmap.mmap, offset: int, layout: DeviceLayout) -> None:
    """Makes zeroed memory the lanes of a channel. Done once, before either side opens them."""
    base = address_of(board, offset)
    for lane in range(layout.num_lanes):
        for mailbox in (layout.to_reader(lane), layout.to_writer(lane)):
            init_semaphore(base + mailbox, 0)
            init_semaphore(base + mailbox + SEMAPHORE_BYTES, _NUM_LETTERS)
        for group in range(NUM_GROUPS):
            for slot in range(layout.num_slots):
                init_semaphore(base + layout.freed(lane, group, slot), 0)
        init_semaphore(base + layout.enqueued(lane), 0)


class Mailbox:
    """A few records on their way from one process to another, in shared memory. Each end is used by one thread."""

    def __init__(self, board: mmap.mmap, offset: int) -> None:
        base = address_of(board, offset)
        self._board = board  # semaphores point into it
        self._letters: Semaphore = open_semaphore(base)
        self._room: Semaphore = open_semaphore(base + SEMAPHORE_BYTES)
        self._first = offset + 2 * SEMAPHORE_BYTES
        self._next = 0

    def _place(self) -> int:
        number, self._next = self._next, (self._next + 1) % _NUM_LETTERS
        return self._first + number * _LETTER_BYTES

    def try_put(self, record: Record) -> bool:
        """Puts a record in; False if there is no room."""
        if not self._room.acquire(False):
            return False
        data, at = pack(record), self._place()
        self._board[at] = len(data)
        self._board[at + 1 : at + 1 + len(data)] = data
        self._letters.release()
        return True

    def take(self) -> Record | None:
        """The next record; None if there is none. Raises a `ChannelError` if no record lies there."""
        if not self._letters.acquire(False):
            return None
        at = self._place()
        data = self._board[at + 1 : at + 1 + self._board[at]]
        self._room.release()
        return unpack(data)
