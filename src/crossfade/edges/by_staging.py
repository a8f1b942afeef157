"""Carries tensors through pinned memory of the host, in chunks (``device.staged``), where devices cannot reach each other.

Device tensors of a value stay out of its message, as ``edges.by_copies`` has them, and go through a lane to each reader. A value
may need many more chunks than there are: both hosts continue in their loops (`progress`), and neither waits for its device.

The writer publishes a value's record at once, and enqueues as many chunks as are free. The reader takes the record when its
program has asked for the value: then it takes memory of torch's and enqueues the copies into it. The value is there when all of
them are enqueued (PL-5). Then it is put together, and the compute stream waits for the last copy.

A reader that has no memory lets the chunks go by, and gets a `Failure` in the place of the value. A value without device tensors
costs no lane anything. Where the device is the CPU, CPU tensors go the same way.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.values.device_codec import Split, notes_of
from crossfade.device.context import DeviceContext
from crossfade.device.recorded import Recorded
from crossfade.device.records import Announced, Finished
from crossfade.device.signals import Counter
from crossfade.device.staged import StagedReceiver, StagedSender, StagedStreams
from crossfade.device.staged_layout import StagedLayout
from crossfade.device.streams import Role
from crossfade.edges.arrivals import Arrivals, Arriving, Coming, Requests, put_together
from crossfade.edges.carrier import Incoming, Outgoing
from crossfade.edges.host_copies import Joiner
from crossfade.edges.lane import Post
from crossfade.edges.layout import Lanes
from crossfade.edges.sources import Sources, cannot_send, places_from
from crossfade.errors import ChannelBroken, DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory

_NOTE = struct.Struct("<Q")  # of each of the writer's devices: how many bytes of the value come from there


def staged_streams(home: DeviceContext, role: Role) -> StagedStreams:
    """The streams that all lanes of a device share, in one direction (`Role.UP` or `Role.DOWN`)."""
    copies, waits, sets = home.streams.get(role), home.streams.get(role, "waits"), home.streams.get(role, "sets")
    return StagedStreams(copies, waits, sets)


def make_streams(home: DeviceContext) -> None:
    """Makes them, so that a watchdog that is started afterwards knows them."""
    for role in (Role.UP, Role.DOWN):
        staged_streams(home, role)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The memory of a channel's lanes, which lie one behind the other from ``offset``. Its owner closes it."""

    memory: Memory
    offset: int
    layout: StagedLayout  # of each lane

    def of(self, lane: int) -> int:
        """Where a lane's begins."""
        return self.offset + lane * self.layout.size_bytes


class _LaneOut:
    """The writing end of a lane: a `StagedSender`, with its records in mailboxes."""

    def __init__(self, home: DeviceContext, lanes: Lanes, lane: int, chunks: Chunks, bell: Bell, label: str) -> None:
        board, offset, layout = lanes
        self._post = Post(board, offset + layout.to_writer(lane), offset + layout.to_reader(lane), bell)
        self._is_finished = self._is_alone = False
        streams, tell = staged_streams(home, Role.UP), self._post.put_unless_known
        self.sender = StagedSender(home.driver, chunks.memory, chunks.layout, streams, tell, label, chunks.of(lane))

    def progress(self) -> bool:
        while (record := self._post.take()) is not None:
            self.sender.on_record(record)
        self.sender.collect()
        return not self._post.flush()

    def mute(self, reason: str) -> None:
        self._is_alone = True
        self.sender.break_off(reason)

    def drain(self) -> bool:
        if not self._is_finished:
            self.sender.break_off("closed by this side")  # what is not enqueued yet is not sent any more
            if not self.sender.is_done:
                return False
            self._is_finished = True
            self._post.put(Finished())
        if self._is_alone:
            self._post.drop()
        return self._post.flush()

    def release(self) -> None:
        self.sender.close()


class _LaneIn:
    """The reading end of a lane: a `StagedReceiver`, with its records in mailboxes, and the memory of what comes."""

    def __init__(self, home: DeviceContext, lanes: Lanes, lane: int, chunks: Chunks, bell: Bell, label: str) -> None:
        board, offset, layout = lanes
        self.num_bytes = 0
        self._post = Post(board, offset + layout.to_reader(lane), offset + layout.to_writer(lane), bell)
        self._coming: deque[tuple[Arriving, int]] = deque()  # with executions; the first one first
        self._is_receiving = self._is_finished = False
        streams = staged_streams(home, Role.DOWN)
        self.receiver = StagedReceiver(
            home.driver, chunks.memory, chunks.layout, streams, self._post.put, label, chunks.of(lane)
        )
        self.arrivals = Arrivals(home, streams.copies)

    def expect(self, size_bytes: int, execution: int) -> Arriving:
        """The next value's part is so long: takes memory for it, and enqueues copies of the chunks that have come."""
        arriving = self.arrivals.expect(size_bytes)
        self.num_bytes += size_bytes
        self._coming.append((arriving, execution))
        self.receiver.on_record(Announced(size_bytes))
        self._receive()
        return arriving

    def _receive(self) -> None:
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
        """Raises `ChannelBroken` if this will not come: the writer, or another party, is gone, or the writer has closed."""
        if self.receiver.ended is not None:
            raise self.receiver.ended
        if self._is_finished and not arriving.event:
            raise ChannelBroken(f"{self.receiver.label}: the other side closed it")

    def progress(self) -> bool:
        while (record := self._post.take()) is not None:
            if isinstance(record, Finished):
                self._is_finished = True  # what it has not enqueued until now does not come any more
            elif self.receiver.ended is None:
                self.receiver.on_record(record)
        self._receive()
        return not self._post.flush()

    def drain(self) -> bool:
        self.receiver.break_off("closed by this side")
        if not self.receiver.is_done:
            return False
        self._coming.clear()
        self._post.drop()
        self.arrivals.close()
        return True

    def release(self) -> None:
        self.receiver.close()


class OutgoingChunks(Outgoing):
    """The writer's side. ``homes``: the devices of this process, in their order; ``bells``: the readers', in their order."""

    ring: ShmWriter

    def __init__(
        self, ring: ShmWriter, lanes: Lanes, chunks: Chunks, homes: Sequence[DeviceContext], bells: Sequence[Bell]
    ) -> None:
        self.ring = ring
        self.sources = Sources(homes, len(homes) * _NOTE.size)
        num = lanes.layout.num_sources
        self.lanes = _all_or_none(
            _LaneOut(homes[lane % num], lanes, lane, chunks, bells[lane // num], f"{ring.name} to reader {lane // num}")
            for lane in range(lanes.layout.num_lanes)
        )

    def split(self, value: object) -> Split:
        return self.sources.split(value)

    def try_send(self, parts: Split) -> bool:
        places = places_from(parts)
        for source, each in places.items():
            _NOTE.pack_into(parts.notes, source * _NOTE.size, each[-1][0] + each[-1][2])
        self.ring.stage(parts.message)
        self.ring.publish()
        try:
            for lane, end in enumerate(self.lanes):
                source = lane % len(self.sources.homes)
                if source in places:
                    end.sender.send_parts(places[source], ready=self.sources.ready[source], keep=parts)
        except (DeviceError, RuntimeError) as error:
            raise cannot_send(self, error) from error
        return True

    def is_flushed(self) -> bool:
        if all(lane.sender.is_flushed for lane in self.lanes):
            return True
        self.ring.raise_if_ended()
        return False

    @property
    def recorded(self) -> Sequence[Recorded]:
        return [lane.sender for lane in self.lanes]

    def progress(self) -> bool:
        return any([lane.progress() for lane in self.lanes])

    def _lanes_to(self, reader: int) -> Sequence[_LaneOut]:
        num_sources = len(self.sources.homes)
        return self.lanes[reader * num_sources : (reader + 1) * num_sources]

    def signals(self, reader: int) -> list[Counter]:
        return [signal for lane in self._lanes_to(reader) for signal in lane.sender.signals()]

    def mute(self, reader: int, reason: str) -> None:
        for lane in self._lanes_to(reader):
            lane.mute(reason)

    def refuse(self, reason: str) -> None:
        for lane in self.lanes:
            lane.sender.break_off(reason)

    def drain(self) -> bool:
        if not all([lane.drain() for lane in self.lanes]):
            return False
        self.sources.close()
        return True

    def release(self) -> None:
        for lane in self.lanes:
            lane.release()


class IncomingChunks(Incoming):
    """The reader's side."""

    def __init__(
        self,
        name: str,
        index: int,
        lanes: Lanes,
        chunks: Chunks,
        # For each of the writer's devices, the device of this process on which its tensors arrive.
        homes: Sequence[DeviceContext],
        bell: Bell,
        joiner: Joiner,
    ) -> None:
        self.requests = self._requests = Requests()
        self._name = name
        self.joiner = joiner
        self.brought = joiner.brought
        first, label = index * lanes.layout.num_sources, f"{name} at reader {index}"
        self.lanes = _all_or_none(
            _LaneIn(home, lanes, first + source, chunks, bell, label) for source, home in enumerate(homes)
        )

    def decode(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        notes = notes_of(message)
        if notes is None and self.joiner.copies is None:
            return self.joiner.join(message, is_private)
        parts: dict[int, Arriving] = {}
        for source, lane in enumerate(self.lanes):
            size_bytes = 0 if notes is None else _NOTE.unpack_from(notes, source * _NOTE.size)[0]
            if size_bytes:  # the value may be asked for ahead of its execution
                parts[source] = lane.expect(size_bytes, ring.num_values)
        return Coming(message, is_private, parts)

    def is_here(self, coming: Coming) -> bool:
        for source, part in coming.parts.items():
            self.lanes[source].check(part)
        return coming.is_enqueued

    def finish(self, coming: Coming) -> object:
        return put_together(self._name, coming, [lane.arrivals for lane in self.lanes], self.joiner)

    @property
    def recorded(self) -> Sequence[Recorded]:
        return [lane.receiver for lane in self.lanes]

    def progress(self) -> bool:
        self._requests.take()
        return any([lane.progress() for lane in self.lanes])

    def signals(self) -> list[Counter]:
        return [signal for lane in self.lanes for signal in lane.receiver.signals()]

    def refuse(self, reason: str) -> None:
        for lane in self.lanes:
            lane.receiver.break_off(reason)

    def leave(self) -> None:
        self._requests.clear()

    def drain(self) -> bool:
        return all([lane.drain() for lane in self.lanes])

    def release(self) -> None:
        for lane in self.lanes:
            lane.release()

    def statistics(self, ring: ShmReader) -> ChannelStatistics:
        whole = ring.statistics()
        return replace(whole, num_bytes=whole.num_bytes + sum(lane.num_bytes for lane in self.lanes))


_Lane = TypeVar("_Lane", _LaneOut, _LaneIn)


def _all_or_none(lanes: Iterable[_Lane]) -> list[_Lane]:
    """A channel's lanes, as they are made. If one cannot be, those before it give their memory back."""
    made: list[_Lane] = []
    try:
        made.extend(lanes)
    except BaseException:
        for lane in made:
            lane.release()
        raise
    return made
