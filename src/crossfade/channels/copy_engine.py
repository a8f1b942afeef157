"""The copy-engine channel: a shared-memory ring, and beside it lanes that carry device tensors.

The ring carries every value's message; the tensors in it that lie on a device of the writer's stay out of the message
(``channels.device_codec``) and go through a *lane* to each reader, from device to device, as they are. So a value without such
tensors (a number, a `Failure`) is what it is in shared memory, and costs no lane anything.

PL-5: the record is published after the copies into every reader's slot, and the settings of ``full`` behind them, are enqueued.
What can fail comes before: room in the ring, a slot in every lane, memory for the message. A reader that has the record enqueues
a wait for ``full`` and gives the tensors away as views on their slots, computed or not. No host waits for a device.

Where the device is the CPU (`crossfade.device.driver.HOST`), CPU tensors go the same way.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crossfade.channels.asking import all_of, any_of
from crossfade.channels.device_codec import Make, Split, Splitter, join
from crossfade.channels.device_home import WITHOUT_TENSORS, DeviceHome, Recorded, source_of
from crossfade.channels.device_lane import LaneReader, LaneWriter
from crossfade.channels.device_layout import DeviceLayout
from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import ShmReader, ShmWriter
from crossfade.device.signals import Releasable, SignalBoard
from crossfade.device.tensors import Leased, tensor_on
from crossfade.errors import ChannelBroken, DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory

if TYPE_CHECKING:
    import torch

__all__ = ["CopyReader", "CopyWriter"]

_NOTE = struct.Struct("<IIQ")
"""Of each lane: the generation and the slot of its part of the value, and its length; of an unused one, `_UNUSED`."""

_UNUSED = 0xFFFF_FFFF


class CopyWriter(ShmWriter):
    """The writing end.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        heap: the writer's heap.
        bells: the readers' doorbells, in the order of the readers.
        lanes_offset, layout: where the lanes' blocks lie on the board.
        homes: the devices of this process, in their order.
        signals: of all lanes, as each of those devices sees them.
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
        homes: Sequence[DeviceHome],
        signals: Sequence[SignalBoard],
    ) -> None:
        super().__init__(name, board, offset, ring, heap, bells)
        self._homes = homes
        self.lanes = [
            LaneWriter(
                homes[lane % layout.num_sources],
                board,
                lanes_offset,
                layout,
                lane,
                signals[lane % layout.num_sources],
                bells[lane // layout.num_sources],
                f"{name} to reader {lane // layout.num_sources}",
            )
            for lane in range(layout.num_lanes)
        ]
        self._splitter = Splitter(source_of(homes), layout.num_lanes * _NOTE.size)
        self._unused = _NOTE.pack(_UNUSED, 0, 0)
        self._ready = [home.driver.create_event() for home in homes]
        self._pending: tuple[object, Split] | None = None  # a value that there was no room for yet, taken apart

    def try_write(self, value: object) -> bool:
        """See the protocol. On a device, the tensors of the value may be computed only by what is enqueued now.

        Raises:
            DeviceError: a reader has no memory for the value.
        """
        if type(value) in WITHOUT_TENSORS:
            return super().try_write(value)
        if self._pending is not None and self._pending[0] is value:
            parts = self._pending[1]
        else:
            parts = self._split(value)
            self._pending = (value, parts)
        try:
            if not (self.has_room() and (not parts.tensors or self._has_slots(parts))):
                return False
            self._note(parts)
            self.stage(parts.message)
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        if parts.tensors:
            self._send(parts)
        self.publish()
        return True

    def _split(self, value: object) -> Split:
        parts = self._splitter.split(value)
        for source in parts.lane_bytes:
            home = self._homes[source]
            home.driver.record_event(self._ready[source], home.compute_stream())
        return parts

    def _used(self, parts: Split) -> list[tuple[int, int]]:
        """(lane, source) of the lanes that a value takes: from each of its devices to every reader."""
        num_sources = len(self._homes)
        return [(lane, lane % num_sources) for lane in range(len(self.lanes)) if lane % num_sources in parts.lane_bytes]

    def _has_slots(self, parts: Split) -> bool:
        """Whether every lane has a slot for its part; if not, the readers ring when that changes."""
        for is_last in (False, True):
            if all_of(self.lanes[lane].can_send(parts.lane_bytes[source]) for lane, source in self._used(parts)):
                return True
            if not is_last:  # what came before this was seen has rung nobody: look once more
                self.ask_to_be_rung()
        return False

    def _note(self, parts: Split) -> None:
        """Writes into the message which slot each lane is going to fill."""
        if not parts.tensors:
            return
        for lane in range(len(self.lanes)):
            parts.notes[lane * _NOTE.size : (lane + 1) * _NOTE.size] = self._unused
        for lane, source in self._used(parts):
            place = self.lanes[lane].ring.next_place
            if place is not None:
                _NOTE.pack_into(parts.notes, lane * _NOTE.size, *place, parts.lane_bytes[source])

    def _send(self, parts: Split) -> None:
        try:
            for lane, source in self._used(parts):
                places = [
                    (each.offset, each.tensor.data_ptr(), each.size_bytes)
                    for each in parts.tensors
                    if each.lane == source
                ]
                self.lanes[lane].ring.try_send_parts(places, ready=self._ready[source], keep=parts)
        except DeviceError as error:  # some lanes may have got it, so none can go on
            self.break_off(f"a copy could not be enqueued: {error}")
            raise ChannelBroken(f"channel {self.name} is broken: {error}") from error

    @property
    def recorded(self) -> Sequence[Recorded]:
        """What enqueues its copies, by lane."""
        return [lane.ring for lane in self.lanes]

    def signals(self, reader: int) -> list[Releasable]:
        """What a reader sets and streams of this process may wait for. Any thread may ask."""
        num_sources = len(self._homes)
        lanes = self.lanes[reader * num_sources : (reader + 1) * num_sources]
        return [signal for lane in lanes for signal in lane.ring.signals()]

    def try_flush(self) -> bool:
        """See the protocol."""
        return all(lane.ring.is_done for lane in self.lanes)

    def serve(self) -> bool:
        """Sees to what is not on a value's way; in the loop, after the doorbell rang. Whether it should soon be called again."""
        return any_of(lane.serve() for lane in self.lanes)

    def give_up(self, reason: str) -> None:
        """Somebody else is gone, and the readers are not: no value is written any more, and they are told how the channel ends."""
        self.break_off(reason)
        for lane in self.lanes:
            lane.ring.give_up(reason)

    def lose(self, reader: int, reason: str) -> None:
        """A reader is gone: nothing is told to it any more. The others are still told how the channel ends."""
        num_sources = len(self._homes)
        for lane in self.lanes[reader * num_sources : (reader + 1) * num_sources]:
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

    def give_back(self) -> None:
        """Nothing is left once it has settled."""


class CopyReader(ShmReader):
    """One reading end.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        index: which of the readers this is.
        heap_memory: the writer's heap.
        bell: the writer's doorbell.
        lanes_offset, layout: where the lanes' blocks lie on the board.
        homes: for each of the writer's devices, the device of this process on which its tensors arrive.
        signals: of all lanes, as each of those devices sees them.
        slot_bytes: length of the slots to set aside now; 0 to make none before the first tensor comes.
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
        homes: Sequence[DeviceHome],
        signals: Sequence[SignalBoard],
        slot_bytes: int = 0,
    ) -> None:
        super().__init__(name, board, offset, ring, index, heap_memory, bell)
        self._homes = homes
        self._first_lane = index * layout.num_sources
        nudge = self.nudge()
        self.lanes = [
            LaneReader(
                home,
                board,
                lanes_offset,
                layout,
                self._first_lane + source,
                signals[source],
                bell,
                nudge,
                f"{name} at reader {index}",
                slot_bytes if source == 0 else 0,
            )
            for source, home in enumerate(homes)
        ]
        self._num_tensors_copied_out = 0

    def _decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        return join(message, self._open_lanes, private=private, shared=memoryview.toreadonly)

    def _open_lanes(self, notes: memoryview) -> Make:
        """Lets the compute stream wait for the parts of a value, and leases their slots."""
        opened: dict[int, tuple[int, int, Leased, bool]] = {}
        for source, lane in enumerate(self.lanes):
            generation, slot, size_bytes = _NOTE.unpack_from(notes, (self._first_lane + source) * _NOTE.size)
            if generation != _UNUSED:
                is_short = lane.ring.is_short
                lease = lane.accept(generation, slot, size_bytes)
                opened[source] = (lease.address, size_bytes, Leased(lease), is_short)
                self._num_tensors_copied_out += is_short

        def make(source: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            address, size_bytes, leased, is_short = opened[source]
            tensor = tensor_on(address + offset, shape, dtype, self._homes[source].device, keep=leased)
            if offset + tensor.numel() * tensor.itemsize > size_bytes:
                raise ValueError(f"a tensor at {offset} does not lie within the {size_bytes} bytes of its slot")
            return tensor.clone() if is_short else tensor

        return make

    def serve(self) -> bool:
        """Sees to what is not on a value's way; in the loop, after the doorbell rang. Whether it should soon be called again."""
        return any_of(lane.serve() for lane in self.lanes)

    @property
    def recorded(self) -> Sequence[Recorded]:
        """Nothing: what comes is enqueued by the writer."""
        return []

    def signals(self) -> list[Releasable]:
        """What the writer sets and streams of this process may wait for. Any thread may ask."""
        return [signal for lane in self.lanes for signal in lane.ring.signals()]

    def break_off(self, reason: str) -> None:
        """See the protocol."""
        super().break_off(reason)
        for lane in self.lanes:
            lane.break_off(reason)

    def give_up(self, reason: str) -> None:
        """Somebody else is gone, and the writer is not: no tensor is taken any more."""
        for lane in self.lanes:
            lane.ring.give_up(reason)

    def close(self) -> None:
        """See the protocol. The devices may be behind: go on with `settle`."""
        super().close()
        for lane in self.lanes:
            lane.ring.close()

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once no value can come any more and the devices are done with those that
        came.

        Tensors that the program kept stay good; `serve` gives their memory back when they are gone (`is_empty`).
        """
        return all_of(lane.settle() for lane in self.lanes)

    def give_back(self) -> None:
        """Nothing is left once it is empty."""

    @property
    def is_empty(self) -> bool:
        """Once settled: whether all memory has been given back."""
        return all(lane.ring.is_empty for lane in self.lanes)

    def statistics(self) -> ChannelStatistics:
        """See the protocol. Slots are those of the lanes."""
        ring = super().statistics()
        lanes = [lane.ring.statistics() for lane in self.lanes]
        return ChannelStatistics(
            ring.num_values,
            ring.num_bytes + sum(lane.num_bytes for lane in lanes),
            num_copied_out=ring.num_copied_out + self._num_tensors_copied_out,
            num_slots=sum(lane.num_slots for lane in lanes if lane.num_generations),
            slot_bytes=sum(lane.num_slots * lane.slot_bytes for lane in lanes),
            num_kept=ring.num_kept + sum(lane.num_leased for lane in lanes),
        )
