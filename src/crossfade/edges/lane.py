"""Lanes: a ring of ``device/`` from one device of a channel's writer to one of its readers, with its records in shared memory.

That a value is enqueued is told by the channel's own record, which comes in any case. That a slot's ``free`` is enqueued is a
post of the slot's semaphore, which is safe wherever the last view of a value dies. The few other records (offers of slots, and
what leads to them) go through two mailboxes; the end that puts one in wakes the other process, which handles it in its loop
(`progress`) wherever its program stands: a mailbox is never waited for.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from crossfade.device.context import DeviceContext
from crossfade.device.records import Announced, Finished, Offer, Record, pack, unpack
from crossfade.device.ring import NUM_GROUPS
from crossfade.device.ring_receiver import Leased, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import SignalBoard
from crossfade.edges.layout import MAILBOX, Lanes
from crossfade.errors import DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.mailbox import Mailbox, Outbox
from crossfade.host.memory import address_of
from crossfade.host.semaphore import open_semaphore


class Post:
    """The records of one side of a lane: takes the other side's, and sends its own. One thread uses it."""

    def __init__(self, board: mmap.mmap, own: int, theirs: int, bell: Bell) -> None:
        self._own = Mailbox(board, own, MAILBOX)
        self._outbox = Outbox(Mailbox(board, theirs, MAILBOX), partial(_wake, bell))
        self.flush = self._outbox.flush
        self.drop = self._outbox.drop  # the other side is gone

    def take(self) -> Record | None:
        """The next record; None if there is none. Raises a `ChannelError` if no record lies there."""
        data = self._own.take()
        return None if data is None else unpack(data)

    def put(self, record: Record) -> None:
        """Sends it, now or with a later call of anything here."""
        self._outbox.put(pack(record))

    def put_unless_known(self, record: Record) -> None:
        """For a staged sender: that a value comes is known by the channel's own record."""
        if not isinstance(record, Announced):
            self.put(record)


def _wake(bell: Bell) -> None:
    bell.announce_mail()
    bell.ring()


class LaneWriter:
    """The writing end of a lane."""

    def __init__(
        self, home: DeviceContext, lanes: Lanes, lane: int, signals: SignalBoard, bell: Bell, label: str
    ) -> None:
        board, offset, layout = lanes
        base = address_of(board, offset)
        self._post = Post(board, offset + layout.to_writer(lane), offset + layout.to_reader(lane), bell)
        self._freed = [
            [open_semaphore(base + layout.freed(lane, group, slot)).acquire for slot in range(layout.num_slots)]
            for group in range(NUM_GROUPS)
        ]
        # Tells the reader that the copies of a record which went ahead are enqueued.
        self.tell_enqueued: Callable[[], None] = open_semaphore(base + layout.enqueued(lane)).release
        self._offer: Offer | None = None
        self._is_closing = self._is_closed = self._is_broken = False
        part = signals.part(lane * layout.signals_per_lane, layout.signals_per_lane)
        self.ring = RingSender(home.driver, part, home.push_stream, self._post.put, label, tells_values=False)

    def can_send(self, size_bytes: int) -> bool:
        """`RingSender.can_send`, with what the reader has told until now."""
        self._take_mail()
        if self._offer is not None and self.ring.next_place is None:
            self._take_freed(self._offer)
        return self.ring.can_send(size_bytes)

    def tidy(self) -> None:
        """What can wait until a value is on its way: takes slots back, releases sources that were copied. Cannot fail."""
        if self._offer is not None and self.ring.next_place is None:
            self._take_freed(self._offer)
        self.ring.let_go_of_copied()

    def _take_mail(self) -> None:
        while (record := self._post.take()) is not None:
            if isinstance(record, Offer):
                for acquire in self._freed[record.group]:  # the posts of an earlier generation
                    while acquire(False):
                        pass
                self._offer = record
            self.ring.on_record(record)

    def _take_freed(self, offer: Offer) -> None:
        for slot, acquire in enumerate(self._freed[offer.group]):
            while acquire(False):
                self.ring.credit(offer.generation, slot)

    def progress(self) -> bool:
        """Handles control records. True if it should be called again soon."""
        self._take_mail()
        self.ring.collect()
        return not self._post.flush() or self.ring.is_growing

    def mute(self, reason: str) -> None:
        """The reader died. Any thread may call it."""
        self._is_broken = True
        self.ring.break_off(reason)

    def notify(self) -> None:
        """The device does nothing any more: the reader need not wait for it."""
        if not (self._is_closed or self._is_broken):
            self._post.put(Finished())

    def drain(self) -> bool:
        """Whether it is closed. The reader's process makes `progress`, or drains, meanwhile."""
        if not self._is_closed:
            with suppress(DeviceError):  # slots that cannot be opened are not needed any more
                self._take_mail()
            if not self.ring.is_done:
                return False
            self.ring.close()
            self._is_closed = True
        if self._is_broken:
            self._post.drop()
        return self._post.flush()


class _ReaderTells:
    """What a receiver tells, also after its channel is closed, when the last leases end."""

    def __init__(
        self, board: mmap.mmap, post: Post, freed: list[list[Callable[[], None]]], on_freed: Callable[[], None]
    ) -> None:
        self._board = board  # semaphores point into it
        self._post = post
        self._freed = freed
        self._on_freed = on_freed
        self._freed_of: dict[int, list[Callable[[], None]]] = {}  # by generation

    def free(self, generation: int, slot: int) -> None:
        self._freed_of[generation][slot]()
        self._on_freed()

    def tell(self, record: Record) -> None:
        if isinstance(record, Offer):
            self._freed_of[record.generation] = self._freed[record.group]
        self._post.put(record)


class LaneReader:
    """The reading end of a lane."""

    def __init__(
        self,
        home: DeviceContext,
        lanes: Lanes,
        lane: int,
        signals: SignalBoard,
        bell: Bell,
        on_freed: Callable[[], None],  # called, in any thread, when the writer may want to know that a slot is free
        label: str,
        slot_bytes: int = 0,  # length of the first slots; 0 to make none before the first tensor comes
    ) -> None:
        board, offset, layout = lanes
        base = address_of(board, offset)
        self._home = home
        self._post = Post(board, offset + layout.to_reader(lane), offset + layout.to_writer(lane), bell)
        freed: list[list[Callable[[], None]]] = [
            [open_semaphore(base + layout.freed(lane, group, slot)).release for slot in range(layout.num_slots)]
            for group in range(NUM_GROUPS)
        ]
        # Takes, with False without waiting, what the writer's ``tell_enqueued`` told.
        self.is_enqueued: Callable[[bool], bool] = open_semaphore(base + layout.enqueued(lane)).acquire
        self._is_broken = False
        part = signals.part(lane * layout.signals_per_lane, layout.signals_per_lane)
        tells = _ReaderTells(board, self._post, freed, on_freed)
        self.ring = RingReceiver(
            home.driver,
            home.pool,
            part,
            tells.tell,
            label,
            num_slots=layout.num_slots,
            slot_bytes=slot_bytes,
            on_free=tells.free,
        )

    def accept(self, generation: int, slot: int, size_bytes: int) -> Leased:
        """`RingReceiver.accept`, on torch's current stream."""
        return self.ring.accept_at(generation, slot, size_bytes, self._home.compute_stream(), Leased)

    def progress(self) -> bool:
        """Handles control records. True if it should be called again soon."""
        while (record := self._post.take()) is not None:
            self.ring.on_record(record)
        self.ring.collect()
        if self._is_broken:
            self._post.drop()
        return not self._post.flush() or self.ring.is_growing

    def mute(self, reason: str) -> None:
        """The writer died. Any thread may call it; what it was still to be told is dropped by the next `progress`."""
        self._is_broken = True
        self.ring.break_off(reason)

    def drain(self) -> bool:
        """Whether the writer's side is closed and this side's device has done everything.

        Leases may be left then: `progress` gives their slots back when they have ended.
        """
        self.ring.close()
        self.progress()
        return self.ring.is_empty or (self.ring.is_finished and self.ring.statistics().num_leased > 0)
