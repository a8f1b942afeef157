"""The lanes of staged channels: the ends of ``device/staged.py``, with their records in mailboxes.

The channel's own record announces a value, so only chunks are told: those that are on their way, and those that are free again.
Whoever puts a letter into a mailbox wakes the other process, which sees to it in its loop wherever its program stands.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from crossfade.device.home import DeviceHome
from crossfade.device.records import Announced, Finished
from crossfade.device.signals import Counter
from crossfade.device.staged import StagedReceiver, StagedSender, StagedStreams
from crossfade.device.staged_layout import StagedLayout
from crossfade.device.streams import Role
from crossfade.edges.arrivals import Arrivals, Arriving
from crossfade.edges.lane import Post
from crossfade.edges.layout import DeviceLayout, Mailbox
from crossfade.errors import ChannelBroken
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory

__all__ = ["Chunks", "StagedLaneReader", "StagedLaneWriter", "all_or_none", "make_streams", "staged_streams"]


def staged_streams(home: DeviceHome, role: Role) -> StagedStreams:
    """The streams that all lanes of a device share, in one direction (`Role.UP` or `Role.DOWN`)."""
    copies, waits, sets = home.streams.get(role), home.streams.get(role, "waits"), home.streams.get(role, "sets")
    return StagedStreams(copies, waits, sets)


def make_streams(home: DeviceHome) -> None:
    """Makes them, so that whoever looks out for deaths knows them."""
    for role in (Role.UP, Role.DOWN):
        staged_streams(home, role)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The memory of a channel's lanes.

    Attributes:
        memory: of all lanes of the plan; whoever made it closes it.
        offset: where this channel's begins; that of each lane is behind that of the one before.
        layout: of each lane.
    """

    memory: Memory
    offset: int
    layout: StagedLayout

    def of(self, lane: int) -> int:
        """Where a lane's begins."""
        return self.offset + lane * self.layout.size_bytes


class StagedLaneWriter:
    """The writing end of a lane.

    Args:
        home: the writer's device.
        board, offset, layout: where the channel's mailboxes lie.
        lane: which lane this is.
        chunks: of all lanes of the channel.
        bell: the reader's doorbell.
        label: for reports.

    Attributes:
        sender: the sending end.
    """

    def __init__(
        self,
        home: DeviceHome,
        board: mmap.mmap,
        offset: int,
        layout: DeviceLayout,
        lane: int,
        chunks: Chunks,
        bell: Bell,
        label: str,
    ) -> None:
        self._mail = Mailbox(board, offset + layout.to_writer(lane))
        self._post = Post(board, offset + layout.to_reader(lane), bell)
        self._is_finished = self._is_alone = False
        streams = staged_streams(home, Role.UP)
        self.sender = StagedSender(
            home.driver, chunks.memory, chunks.layout, streams, self._post.put_unless_known, label, chunks.of(lane)
        )

    def send(self, parts: list[tuple[int, int, int]], ready: int, keep: Any) -> None:
        """`StagedSender.send_parts`."""
        self.sender.send_parts(parts, ready=ready, keep=keep)

    def serve(self) -> bool:
        """Goes on with values whose chunks have become free. Whether it should soon be called again."""
        while (record := self._mail.take()) is not None:
            self.sender.on_record(record)
        self.sender.collect()
        return not self._post.flush()

    def break_off(self, reason: str) -> None:
        """The reader is gone."""
        self._is_alone = True
        self.sender.break_off(reason)

    def settle(self) -> bool:
        """Goes on with closing; whether the device has done everything. What is not enqueued yet is not sent any more."""
        if not self._is_finished:
            self.sender.break_off("closed by this side")
            if not self.sender.is_done:
                return False
            self._is_finished = True
            self._post.put(Finished())
        if self._is_alone:
            self._post.drop()
        return self._post.flush()

    def give_back(self) -> None:
        """Once settled, and once nobody looks at its signals any more: gives the memory back."""
        self.sender.close()

    def signals(self) -> list[Counter]:
        """What this end's streams may wait for."""
        return self.sender.signals()


class StagedLaneReader:
    """The reading end of a lane.

    Args:
        home: the reader's device.
        board, offset, layout: where the channel's mailboxes lie.
        lane: which lane this is.
        chunks: of all lanes of the channel.
        bell: the writer's doorbell.
        label: for reports.

    Attributes:
        receiver: the receiving end.
        arrivals: the memory of what comes.
        num_bytes: announced so far.
    """

    def __init__(
        self,
        home: DeviceHome,
        board: mmap.mmap,
        offset: int,
        layout: DeviceLayout,
        lane: int,
        chunks: Chunks,
        bell: Bell,
        label: str,
    ) -> None:
        self.home = home
        self.num_bytes = 0
        self._mail = Mailbox(board, offset + layout.to_reader(lane))
        self._post = Post(board, offset + layout.to_writer(lane), bell)
        self._coming: deque[tuple[Arriving, int]] = (
            deque()
        )  # with executions; the first is being received, if `_is_receiving`
        self._is_receiving = self._is_finished = False
        streams = staged_streams(home, Role.DOWN)
        self.receiver = StagedReceiver(
            home.driver, chunks.memory, chunks.layout, streams, self._post.put, label, chunks.of(lane)
        )
        self.arrivals = Arrivals(home, streams.copies)

    def expect(self, size_bytes: int, execution: int) -> Arriving:
        """The next value's part, of this execution, is so long: takes memory for it, and goes on as far as chunks have come."""
        arriving = self.arrivals.expect(size_bytes)
        self.num_bytes += size_bytes
        self._coming.append((arriving, execution))
        self.receiver.on_record(Announced(size_bytes))
        self._go_on()
        return arriving

    def _go_on(self) -> None:
        while self._coming and self.receiver.ended is None:
            if not self._is_receiving:
                self._is_receiving = True
                arriving, execution = self._coming[0]
                self.receiver.receive(arriving.address, execution=execution)
            if not self.receiver.is_enqueued:
                return
            self._is_receiving = False
            self.arrivals.filled(self._coming.popleft()[0])

    def check(self, arriving: Arriving) -> None:
        """Raises why nobody may wait for this any more, if that is so.

        Raises:
            ChannelBroken: the writer, or somebody else, is gone; or the writer has closed it and this will not come.
        """
        if self.receiver.ended is not None:
            raise self.receiver.ended
        if self._is_finished and not arriving.event:
            raise ChannelBroken(f"{self.receiver.label}: the other side closed it")

    def serve(self) -> bool:
        """Enqueues the copies of chunks that are on their way. Whether it should soon be called again."""
        while (record := self._mail.take()) is not None:
            if isinstance(record, Finished):
                self._is_finished = True  # what it has not enqueued until now does not come any more
            elif self.receiver.ended is None:
                self.receiver.on_record(record)
        self._go_on()
        return not self._post.flush()

    def break_off(self, reason: str) -> None:
        """The writer, or somebody else, is gone."""
        self.receiver.break_off(reason)

    def settle(self) -> bool:
        """Goes on with closing; whether the device has done everything."""
        self.receiver.break_off("closed by this side")
        if not self.receiver.is_done:
            return False
        self._coming.clear()
        self._post.drop()
        self.arrivals.close()
        return True

    def give_back(self) -> None:
        """Once settled, and once nobody looks at its signals any more: gives the memory back."""
        self.receiver.close()

    def signals(self) -> list[Counter]:
        """What this end's streams may wait for."""
        return self.receiver.signals()


_Lane = TypeVar("_Lane", StagedLaneWriter, StagedLaneReader)


def all_or_none(lanes: Iterable[_Lane]) -> list[_Lane]:
    """A channel's lanes, as they are made. If one cannot be, those before it give their memory back."""
    made: list[_Lane] = []
    try:
        made.extend(lanes)
    except BaseException:
        for lane in made:
            lane.give_back()
        raise
    return made
