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
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from crossfade.channels.asking import all_of, any_of
from crossfade.channels.bare import MOST_DESCRIPTION_BYTES, NOTE, NUMBER, Kind, Kinds, KindTable
from crossfade.channels.codec import is_plain
from crossfade.channels.device_codec import LaneOf, Make, Split, Splitter, dense, join
from crossfade.channels.device_home import DeviceHome
from crossfade.channels.device_lane import LaneReader, LaneWriter
from crossfade.channels.device_layout import DeviceLayout
from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import INLINE_BYTES, ShmReader, ShmWriter
from crossfade.channels.turns import Turns
from crossfade.device.driver import HOST
from crossfade.device.signals import SignalBoard
from crossfade.device.tensors import Leased, tensor_on
from crossfade.errors import ChannelBroken, DeviceError, Failure
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory

if TYPE_CHECKING:
    import torch

    from crossfade.channels.host_copies import HostCopies

__all__ = ["CopyReader", "CopyWriter"]

_UNUSED = 0xFFFF_FFFF
"""What stands for the generation in the note (`NOTE`: generation, slot, length) of a lane that a value does not take."""

_BARE = 6
"""The kind of a record that is a tensor by itself."""


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
        turns: of its lanes among those of other writers; None if nobody else pushes to its readers.
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
        turns: Turns | None = None,
    ) -> None:
        super().__init__(name, board, offset, ring, heap, bells)
        self._homes = homes
        self._turns = turns
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
        lane_of = _lanes_from(homes)
        self._splitter = Splitter(lane_of, layout.num_lanes * NOTE.size)
        self._unused = NOTE.pack(_UNUSED, 0, 0)
        self._ready = [home.driver.create_event() for home in homes]
        self._pending: tuple[object, Any] | None = None  # a value that there was no room for yet, taken apart
        self._kinds = Kinds(lane_of)
        self._lanes_from = [self.lanes[source :: layout.num_sources] for source in range(layout.num_sources)]
        self._is_bare_short = NUMBER.size + layout.num_readers * NOTE.size + MOST_DESCRIPTION_BYTES <= INLINE_BYTES

    def try_write(self, value: object) -> bool:
        """See the protocol. On a device, the tensors of the value may be computed only by what is enqueued now.

        Raises:
            DeviceError: a reader has no memory for the value.
        """
        if type(value) is Failure or is_plain(value):
            return super().try_write(value)
        kind = self._kinds.of(value) if self._is_bare_short else None
        if kind is not None:
            return self._try_write_bare(value, kind)
        if self._pending is not None and self._pending[0] is value:
            parts = self._pending[1]
        else:
            parts = self._split(value)
            self._pending = (value, parts)
        try:
            if not (self.has_room() and (not parts.tensors or self._has_slots(parts))):
                return False
            if self._turns is not None and self._turns.must_hold(self._num_values + 1, parts.lane_bytes):
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

    def _try_write_bare(self, tensor: Any, kind: Kind) -> bool:
        """`try_write` of a tensor by itself: no pickle, one part in one lane to each reader."""
        if self._pending is not None and self._pending[0] is tensor:
            whole = self._pending[1]
        else:
            whole = dense(tensor)
            home = self._homes[kind.source]
            home.driver.record_event(self._ready[kind.source], home.compute_stream())
            self._pending = (tensor, whole)
        lanes, size_bytes = self._lanes_from[kind.source], kind.size_bytes
        try:
            if not (self.has_room() and self._have_slots(lanes, size_bytes)):
                return False
            if self._turns is not None and self._turns.must_hold(self._num_values + 1, {kind.source: size_bytes}):
                return False
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        self.stage_record(
            _BARE, kind.record(b"".join([NOTE.pack(*lane.ring.place_of_next(), size_bytes) for lane in lanes]))
        )
        self._push(kind.source, ((0, whole.data_ptr(), size_bytes),), size_bytes, whole)
        kind.is_told = True
        self.publish()
        return True

    def _have_slots(self, lanes: Sequence[LaneWriter], size_bytes: int) -> bool:
        if all_of(lane.can_send(size_bytes) for lane in lanes):
            return True
        self.ask_to_be_rung()  # what came before this was seen has rung nobody: look once more
        return all_of(lane.can_send(size_bytes) for lane in lanes)

    def _broken(self, error: DeviceError) -> ChannelBroken:
        """Some lanes may have got a value, so none can go on."""
        self.give_up(f"a copy could not be enqueued: {error}")
        return ChannelBroken(f"channel {self.name} is broken: {error}")

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
        return all_of(self._have_slots(self._lanes_from[source], size) for source, size in parts.lane_bytes.items())

    def _note(self, parts: Split) -> None:
        """Writes into the message which slot each lane is going to fill."""
        if not parts.tensors:
            return
        for lane in range(len(self.lanes)):
            parts.notes[lane * NOTE.size : (lane + 1) * NOTE.size] = self._unused
        for lane, source in self._used(parts):
            place = self.lanes[lane].ring.place_of_next()
            NOTE.pack_into(parts.notes, lane * NOTE.size, *place, parts.lane_bytes[source])

    def _send(self, parts: Split) -> None:
        for source, size_bytes in parts.lane_bytes.items():
            places = [
                (each.offset, each.tensor.data_ptr(), each.size_bytes) for each in parts.tensors if each.lane == source
            ]
            self._push(source, places, size_bytes, parts)

    def _push(self, source: int, places: Sequence[tuple[int, int, int]], size_bytes: int, keep: Any) -> None:
        """Enqueues what lies on one of the devices, to every reader; those where it is not its turn yet come last."""
        turns, ready = self._turns, self._ready[source]
        try:
            if turns is None:
                for each in self._lanes_from[source]:
                    each.ring.send(places, size_bytes, ready=ready, keep=keep)
                return
            number, stream = self._num_values + 1, self._homes[source].push_stream
            for lane in turns.in_turn(range(source, len(self.lanes), len(self._homes)), number, size_bytes):
                turns.wait(lane, number, size_bytes, stream)
                self.lanes[lane].ring.send(places, size_bytes, ready=ready, keep=keep)
                turns.mark(lane, number, size_bytes, stream)
        except DeviceError as error:
            raise self._broken(error) from error

    def publish(self) -> None:
        """Gives what is staged to the readers, and the turn to those after. Cannot fail."""
        if self._turns is None:
            super().publish()
            return
        self._turns.tell(self._num_values + 1)
        super().publish()
        self._turns.ring()

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


def _lanes_from(homes: Sequence[DeviceHome]) -> LaneOf:
    """By which of these devices a tensor goes: its own, if it is one of them."""
    sources: dict[int, int] = {}
    for source, home in enumerate(homes):
        sources.setdefault(home.device, source)

    def lane_of(tensor: torch.Tensor) -> int | None:
        device = tensor.device
        if device.type == "cpu":
            return sources.get(HOST)
        return sources.get(device.index) if device.type == "cuda" else None

    return lane_of


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
        copies: brings tensors in the message, which lay on the CPU, to the device; None where they are wanted on the CPU.
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
        copies: HostCopies | None = None,
    ) -> None:
        super().__init__(name, board, offset, ring, index, heap_memory, bell)
        self._homes = homes
        self._index = index
        self._kinds = KindTable(layout.num_readers)
        self._copies = copies
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

    def _read_message(self, at: int, kind: int, size: int) -> object:
        if kind != _BARE:
            return super()._read_message(at, kind, size)
        payload = memoryview(self._board)[at + 8 : at + 8 + min(size, INLINE_BYTES)]
        source, dtype, shape, requires_grad = self._kinds.find(payload)
        note = NOTE.unpack_from(payload, NUMBER.size + self._index * NOTE.size)
        lane = self.lanes[source]
        is_short = lane.ring.is_short
        lease = lane.accept(*note)
        leased = Leased(lease)
        if lease.size_bytes != prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {lease.size_bytes} bytes")
        tensor = tensor_on(lease.address, shape, dtype, self._homes[source].device, keep=leased)
        if is_short:
            self._num_tensors_copied_out += 1
            tensor = tensor.clone()
        return tensor.requires_grad_() if requires_grad else tensor

    def _decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        if self._copies is None:
            return join(message, self._open_lanes, private=private, shared=memoryview.toreadonly)
        from crossfade.channels.brought import Brought

        brought = Brought(self._copies)
        try:
            return join(message, self._open_lanes, private=brought.place, shared=memoryview.toreadonly)
        finally:
            brought.end()

    def _open_lanes(self, notes: memoryview) -> Make:
        """Lets the compute stream wait for the parts of a value, and leases their slots."""
        opened: dict[int, tuple[int, int, Leased, bool]] = {}
        for source, lane in enumerate(self.lanes):
            generation, slot, size_bytes = NOTE.unpack_from(notes, (self._first_lane + source) * NOTE.size)
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
