"""The staged channel: a shared-memory ring, and beside it lanes that take device tensors through pinned memory of the host.

The ring carries every value's message without the tensors that lie on a device of the writer's, as that of the copy channel does
(``channels.copy_engine``). These go through a lane to each reader, in chunks (``device.staged``), of which a value may need many more
than there are: both hosts go on in their loops (`serve`), and neither waits for its device.

The writer publishes a value's record at once, and enqueues as many chunks as are free. The reader takes the record when its program
has asked for the value (`try_start`): then it takes memory of torch's and enqueues the copies into it. The value is there when all of
them are enqueued (PL-5). Then it is put together, and the compute stream waits for the last copy.

A reader that has no memory lets the chunks go by, and gets a `Failure` in the place of the value. A value without device tensors
costs no lane anything. Where the device is the CPU, CPU tensors go the same way.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crossfade.channels.arrivals import Arriving, tensors_in
from crossfade.channels.asking import all_of, any_of
from crossfade.channels.codec import undecodable
from crossfade.channels.device_codec import Split, Splitter, join, notes_of
from crossfade.channels.device_home import WITHOUT_TENSORS, DeviceHome, source_of
from crossfade.channels.device_layout import DeviceLayout
from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import ShmReader, ShmWriter
from crossfade.channels.staged_lane import Chunks, StagedLaneReader, StagedLaneWriter
from crossfade.device.signals import Releasable
from crossfade.errors import ChannelBroken, DeviceError, Failure
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory

if TYPE_CHECKING:
    import torch

__all__ = ["StagedReader", "StagedWriter"]

_NOTE = struct.Struct("<Q")
"""Of each of the writer's devices: how many bytes of the value come from there."""


class StagedWriter(ShmWriter):
    """The writing end.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        heap: the writer's heap.
        bells: the readers' doorbells, in the order of the readers.
        lanes_offset, layout: where the lanes' mailboxes lie on the board.
        chunks: the lanes' memory.
        homes: the devices of this process, in their order.
    """

    def __init__(
        self,
        name: str,
        board: mmap.mmap,
        offset: int,
        ring: RingLayout,
        heap: Heap,
        bells: Sequence[Bell],
        *,
        lanes_offset: int,
        layout: DeviceLayout,
        chunks: Chunks,
        homes: Sequence[DeviceHome],
    ) -> None:
        super().__init__(name, board, offset, ring, heap, bells)
        self._homes = homes
        num = layout.num_sources
        self.lanes = [
            StagedLaneWriter(
                homes[lane % num],
                board,
                lanes_offset,
                layout,
                lane,
                chunks,
                bells[lane // num],
                f"{name} to reader {lane // num}",
            )
            for lane in range(layout.num_lanes)
        ]
        self._splitter = Splitter(source_of(homes), num * _NOTE.size)
        self._ready = [home.driver.create_event() for home in homes]
        self._pending: tuple[object, Split] | None = None  # a value that there was no room for yet, taken apart

    def try_write(self, value: object) -> bool:
        """See the protocol. On a device, the tensors of the value may be computed only by what is enqueued now."""
        if type(value) in WITHOUT_TENSORS:
            return super().try_write(value)
        if self._pending is None or self._pending[0] is not value:
            self._pending = (value, self._split(value))
        parts = self._pending[1]
        try:
            if not self.has_room():
                return False
            places = _places(parts)
            for source, each in places.items():
                _NOTE.pack_into(parts.notes, source * _NOTE.size, each[-1][0] + each[-1][2])
            self.stage(parts.message)
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        self.publish()
        if places:
            self._send(parts, places)
        return True

    def _split(self, value: object) -> Split:
        parts = self._splitter.split(value)
        for source in parts.lane_bytes:
            home = self._homes[source]
            home.driver.record_event(self._ready[source], home.compute_stream())
        return parts

    def _send(self, parts: Split, places: dict[int, list[tuple[int, int, int]]]) -> None:
        try:
            for lane, end in enumerate(self.lanes):
                source = lane % len(self._homes)
                if source in places:
                    end.send(places[source], self._ready[source], parts)
        except DeviceError as error:  # some lanes may have got it, so none can go on
            self.break_off(f"a copy could not be enqueued: {error}")
            raise ChannelBroken(f"channel {self.name} is broken: {error}") from error

    def try_flush(self) -> bool:
        """Whether all copies of every accepted value are enqueued.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
        """
        if all(lane.sender.is_flushed for lane in self.lanes):
            return True
        self._raise_if_ended()
        return False

    def serve(self) -> bool:
        """Goes on with values under way; in the loop, after the doorbell rang. Whether it should soon be called again."""
        return any_of(lane.serve() for lane in self.lanes)

    def signals(self, reader: int) -> list[Releasable]:
        """What a reader sets and streams of this process may wait for. Any thread may ask."""
        return [signal for lane in self._lanes_to(reader) for signal in lane.signals()]

    def _lanes_to(self, reader: int) -> list[StagedLaneWriter]:
        num_sources = len(self._homes)
        return self.lanes[reader * num_sources : (reader + 1) * num_sources]

    def give_up(self, reason: str) -> None:
        """Somebody else is gone, and the readers are not: no value is written any more, and no chunk enqueued."""
        self.break_off(reason)
        for lane in self.lanes:
            lane.sender.break_off(reason)

    def lose(self, reader: int, reason: str) -> None:
        """A reader is gone: nothing is told to it any more. The others get nothing more either."""
        for lane in self._lanes_to(reader):
            lane.break_off(reason)
        self.give_up(reason)

    def close(self) -> None:
        """See the protocol. The devices may be behind: go on with `settle`."""
        self._pending = None
        super().close()

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once nothing here is used any more, by this process or by a device."""
        if not all_of(lane.settle() for lane in self.lanes):
            return False
        for home, event in zip(self._homes, self._ready, strict=False):
            home.driver.destroy_event(event)
        self._ready = []
        return True


def _places(parts: Split) -> dict[int, list[tuple[int, int, int]]]:
    """Of each of the writer's devices, the tensors that hold anything: (offset in its part of the value, address, length)."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for each in parts.tensors:
        if each.size_bytes:
            places.setdefault(each.lane, []).append((each.offset, each.tensor.data_ptr(), each.size_bytes))
    return places


class _Coming:
    """A value whose message has come: which of its parts are awaited, by the writer's device."""

    __slots__ = ("message", "parts", "private")

    def __init__(
        self, message: memoryview, private: Callable[[memoryview], object], parts: dict[int, Arriving]
    ) -> None:
        self.message = message
        self.private = private
        self.parts = parts

    @property
    def is_enqueued(self) -> bool:
        """Whether everything that brings it is enqueued."""
        return all(part.event for part in self.parts.values())


class StagedReader(ShmReader):
    """One reading end.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        index: which of the readers this is.
        heap_memory: the writer's heap.
        bell: the writer's doorbell.
        lanes_offset, layout: where the lanes' mailboxes lie on the board.
        chunks: the lanes' memory.
        homes: for each of the writer's devices, the device of this process on which its tensors arrive.

    Attributes:
        inbox: values that were asked for and whose records have come.
    """

    def __init__(
        self,
        name: str,
        board: mmap.mmap,
        offset: int,
        ring: RingLayout,
        index: int,
        heap_memory: Memory,
        bell: Bell,
        *,
        lanes_offset: int,
        layout: DeviceLayout,
        chunks: Chunks,
        homes: Sequence[DeviceHome],
    ) -> None:
        super().__init__(name, board, offset, ring, index, heap_memory, bell)
        first = index * layout.num_sources
        label = f"{name} at reader {index}"
        self.lanes = [
            StagedLaneReader(home, board, lanes_offset, layout, first + source, chunks, bell, label)
            for source, home in enumerate(homes)
        ]
        self._has_no_record = self.is_idle
        self.is_idle = self._is_idle
        self._num_held = 0  # started and not yet released
        self._num_wanted = 0  # started, and the record is not taken yet
        self.inbox: deque[object] = deque()

    def try_start(self) -> bool:
        """See the protocol."""
        if self._is_closed or (self._state[self._gone] and self._has_no_record()):
            self._raise_if_ended()
        if self._num_held >= self.layout.depth:
            return False
        self._num_held += 1
        self._num_wanted += 1
        self._take_records()
        return True

    def release(self) -> None:
        """See the protocol."""
        self._num_held -= 1

    def _take_records(self) -> None:
        while self._num_wanted and not self._has_no_record():
            value = super().try_read()
            if value is EMPTY:
                return
            self._num_wanted -= 1
            self.inbox.append(value)

    def _is_idle(self) -> bool:
        """See the protocol."""
        return not self.inbox and self._has_no_record()

    def try_read(self) -> object:
        """See the protocol."""
        if self._is_closed:
            self._raise_if_ended()
        self._take_records()
        if not self.inbox:
            if self._state[self._gone] and self._has_no_record():
                self._raise_if_ended()
            return EMPTY
        value = self.inbox[0]
        if isinstance(value, _Coming):
            for source in value.parts:
                self.lanes[source].check()
            if not value.is_enqueued:
                return EMPTY
            value = self._put_together(value)
        self.inbox.popleft()
        return value

    def _decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        notes = notes_of(message)
        if notes is None:
            return join(message, _no_lanes, private=private, shared=memoryview.toreadonly)
        sizes_bytes = [_NOTE.unpack_from(notes, source * _NOTE.size)[0] for source in range(len(self.lanes))]
        parts = {
            source: self.lanes[source].expect(size_bytes)
            for source, size_bytes in enumerate(sizes_bytes)
            if size_bytes
        }
        return _Coming(message, private, parts)

    def _put_together(self, coming: _Coming) -> object:
        """The value, whose tensors are there for whoever computes behind this."""
        for source, part in coming.parts.items():
            self.lanes[source].arrivals.use(part)
        refused = next((part for part in coming.parts.values() if part.buffer is None), None)
        if refused is not None:
            return self._no_memory(refused)
        buffers = {source: part.buffer for source, part in coming.parts.items() if part.buffer is not None}
        make = tensors_in(buffers, {source: lane.home.device for source, lane in enumerate(self.lanes)})
        try:
            return join(coming.message, lambda _: make, private=coming.private, shared=memoryview.toreadonly)
        except Exception as error:
            return undecodable(error, self.name)

    def _no_memory(self, part: Arriving) -> Failure:
        error = DeviceError(
            f"channel {self.name}: there is no memory for a value of {part.size_bytes} bytes: {part.refusal}",
            hint="keep fewer tensors on the receiver's device, or let fewer executions be under way",
        )
        return Failure.capture(error, actor="", node=f"receiving the value of {self.name}")

    def serve(self) -> bool:
        """Goes on with values under way; in the loop, after the doorbell rang. Whether it should soon be called again."""
        if not self._is_closed:
            self._take_records()
        return any_of(lane.serve() for lane in self.lanes)

    def signals(self) -> list[Releasable]:
        """What the writer sets and streams of this process may wait for. Any thread may ask."""
        return [signal for lane in self.lanes for signal in lane.signals()]

    def break_off(self, reason: str) -> None:
        """See the protocol."""
        super().break_off(reason)
        self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Somebody else is gone, and the writer is not: no tensor is taken any more."""
        for lane in self.lanes:
            lane.break_off(reason)

    def close(self) -> None:
        """See the protocol. The devices may be behind: go on with `settle`."""
        super().close()
        self.inbox.clear()

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once no device brings anything here any more."""
        return all_of(lane.settle() for lane in self.lanes)

    @property
    def is_empty(self) -> bool:
        """Once settled: whether all memory has been given back. (Tensors that came are torch's.)"""
        return True

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        ring = super().statistics()
        return ChannelStatistics(
            ring.num_values,
            ring.num_bytes + sum(lane.num_bytes for lane in self.lanes),
            num_copied_out=ring.num_copied_out,
            num_kept=ring.num_kept,
        )


def _no_lanes(notes: memoryview) -> Callable[..., torch.Tensor]:
    raise ValueError("a value has no lanes")
