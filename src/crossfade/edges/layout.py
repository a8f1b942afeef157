"""Where the lanes of a channel lie on the board, behind its ring (``edges.by_copies``, ``edges.by_staging``).

Each lane has a block: two mailboxes, a semaphore for each slot that can ever be offered, one for what was told ahead, and how far
its writer is (`crossfade.edges.turns`).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import NamedTuple

from crossfade.device.ring import NUM_GROUPS, num_signals
from crossfade.device.signals import WORD_BYTES
from crossfade.edges.turns import PROGRESS_BYTES
from crossfade.host.mailbox import MailboxShape
from crossfade.host.memory import address_of, align
from crossfade.host.semaphore import SEMAPHORE_BYTES, init_semaphore

MAILBOX = MailboxShape(num_letters=16, letter_bytes=128)


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
        return self.to_reader(lane) + MAILBOX.size_bytes

    def freed(self, lane: int, group: int, slot: int) -> int:
        """Offset of the semaphore that the reader posts when it has enqueued ``free`` of a slot."""
        return self.to_writer(lane) + MAILBOX.size_bytes + (group * self.num_slots + slot) * SEMAPHORE_BYTES

    def enqueued(self, lane: int) -> int:
        """Offset of the semaphore that the writer posts when it has enqueued what a record told beforehand (`TENSOR_AHEAD`)."""
        return self.freed(lane, NUM_GROUPS, 0)

    def progress(self, lane: int) -> int:
        """Offset of where the writer says how far it is."""
        return self.to_reader(lane + 1) - PROGRESS_BYTES

    @property
    def _lane_bytes(self) -> int:
        num_semaphores = NUM_GROUPS * self.num_slots + 1
        return align(2 * MAILBOX.size_bytes + num_semaphores * SEMAPHORE_BYTES, 64) + PROGRESS_BYTES

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
            MAILBOX.format(base + mailbox)
        for group in range(NUM_GROUPS):
            for slot in range(layout.num_slots):
                init_semaphore(base + layout.freed(lane, group, slot), 0)
        init_semaphore(base + layout.enqueued(lane), 0)
