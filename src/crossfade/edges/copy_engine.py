"""The copy-engine channel: a shared-memory ring, and beside it lanes that carry device tensors. Here, its writing end.

The ring carries every value's message; the tensors in it that lie on a device of the writer's stay out of the message
(``channels.values.device_codec``) and go through a *lane* to each reader, from device to device, as they are. So a value without
such tensors (a number, a `Failure`) is what it is in shared memory, and costs no lane anything.

PL-5: the record is published after the copies into every reader's slot, and the settings of ``full`` behind them, are enqueued.
What can fail comes before: room in the ring, a slot in every lane, memory for the message. A reader that has the record enqueues
a wait for ``full`` and gives the tensors away as views on their slots, computed or not. No host waits for a device.

The record of a tensor by itself goes *ahead*: it is published before the copies are enqueued, which takes the writer's host 10 us,
and a semaphore tells when they are. The reader makes the tensor meanwhile, and enqueues its wait when it has been told, so PL-5
holds. Where a copy could not be enqueued, the record says so by then.

Where the device is the CPU (`crossfade.device.driver.HOST`), CPU tensors go the same way.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import INLINE_BYTES, ShmWriter
from crossfade.channels.values.codec import is_plain
from crossfade.channels.values.device_codec import Split, Splitter, dense
from crossfade.device.home import DeviceHome, source_of
from crossfade.device.recorded import Recorded
from crossfade.device.signals import Releasable, SignalBoard
from crossfade.device.tensors import stream_getter
from crossfade.edges.lane import LaneWriter
from crossfade.edges.layout import DeviceLayout
from crossfade.edges.short_failure import short_failure
from crossfade.edges.tensor_path import AHEAD, BARE, MOST_DESCRIPTION_BYTES, NOTE, NUMBER, REPLACED, UNUSED, Kind, Kinds
from crossfade.edges.turns import Turns
from crossfade.errors import CrossfadeError, DeviceError, Failure
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap
from crossfade.host.semaphore import FENCE_AFTER_POST

__all__ = ["CopyWriter"]


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
        actor: who writes, for errors.
        node: what makes the values, for errors.
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
        actor: str = "",
        node: str = "",
    ) -> None:
        super().__init__(name, board, offset, ring, heap, bells)
        self._where = (actor, f"{node or f'the value of channel {name}'}, copying it to its readers' devices,")
        self._has_failed = False
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
        lane_of = source_of(homes)
        self._splitter = Splitter(lane_of, layout.num_lanes * NOTE.size)
        self._unused = NOTE.pack(UNUSED, 0, 0)
        self._ready = [home.driver.create_event() for home in homes]
        self._pending: tuple[object, Any] | None = None  # a value that there was no room for yet, taken apart
        self._kinds = Kinds(lane_of)
        self._lanes_from = [self.lanes[source :: layout.num_sources] for source in range(layout.num_sources)]
        self._is_bare_short = NUMBER.size + layout.num_readers * NOTE.size + MOST_DESCRIPTION_BYTES <= INLINE_BYTES
        self._rings_from = [[lane.ring for lane in lanes] for lanes in self._lanes_from]
        self._compute = [stream_getter(home.device) for home in homes]
        self._tells_from = [
            [(lane.tell_enqueued, bell.flags, bell.ring) for lane, bell in zip(lanes, bells, strict=True)]
            for lanes in self._lanes_from
        ]

    def try_write(self, value: object) -> bool:
        """See the protocol. On a device, the tensors of the value may be computed only by what is enqueued now.

        Where a copy cannot be enqueued, the readers get that error in the value's place, and the channel is broken from then on.

        Raises:
            DeviceError: a reader has no memory for the value.
        """
        kind = self._kinds.of(value) if self._is_bare_short else None
        if kind is not None:
            if self._pending is None and self._turns is None and self._is_ready_for(kind):
                self._write_bare(value, kind)
                return True
            return self._try_write_bare(value, kind)
        if type(value) is Failure or is_plain(value):
            return super().try_write(value)
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

    def _is_ready_for(self, kind: Kind) -> bool:
        """A quick look: whether there is room for a tensor by itself."""
        is_ready = self.has_room()
        for ring in self._rings_from[kind.source]:
            is_ready = is_ready and ring.has_slot(kind.size_bytes)
        return is_ready

    def _write_bare(self, tensor: Any, kind: Kind) -> None:
        """Writes a tensor by itself where there is room; what else there is to do comes when it is on its way."""
        source, size_bytes, rings, at = kind.source, kind.size_bytes, self._rings_from[kind.source], self._at
        whole, ready = dense(tensor), self._ready[source]
        self.stage_record(AHEAD, kind.record_for([ring.place_of_next() for ring in rings]))
        kind.is_told = True
        try:
            super().publish()  # the readers prepare meanwhile; there are no turns
            self._homes[source].driver.record_event(ready, self._compute[source]())
            parts = ((0, whole.data_ptr(), size_bytes),)
            for ring in rings:
                ring.send(parts, size_bytes, ready=ready, keep=whole)
        except BaseException as error:
            self._fail(error, at)
            if not isinstance(error, CrossfadeError):
                raise
        finally:
            for tell, flags, ring_bell in self._tells_from[source]:
                tell()
                if FENCE_AFTER_POST:
                    self._fence()
                if flags[0]:
                    ring_bell()
        for lane in self._lanes_from[source]:
            lane.tidy()

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
        self.stage_record(BARE, kind.record_for([lane.ring.place_of_next() for lane in lanes]))
        self._push(kind.source, ((0, whole.data_ptr(), size_bytes),), size_bytes, whole)
        kind.is_told = True
        self.publish()
        return True

    def _have_slots(self, lanes: Sequence[LaneWriter], size_bytes: int) -> bool:
        if all([lane.can_send(size_bytes) for lane in lanes]):
            return True
        self.ask_to_be_rung()  # what came before this was seen has rung nobody: look once more
        return all([lane.can_send(size_bytes) for lane in lanes])

    def _fail(self, error: BaseException, at: int) -> None:
        """Some lanes may have got the value of the record at ``at``, so none can go on: its readers get an error in its place, and
        the next try to write raises.
        """
        text = f"a copy could not be enqueued: {str(error) or type(error).__name__}"
        self._words[at >> 3] = REPLACED
        self._fence()
        self._put_pickle(at, short_failure(DeviceError(f"channel {self.name}: {text}"), *self._where))
        self._has_failed = True
        self.give_up(text)

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
        return all([self._have_slots(self._lanes_from[source], size) for source, size in parts.lane_bytes.items()])

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
            if self._has_failed:
                return
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
        except CrossfadeError as error:
            self._fail(error, self._at)

    def publish(self) -> None:
        """Gives what is staged to the readers, and the turn to those after. Cannot fail."""
        if self._turns is None:
            super().publish()
            return
        self._turns.tell(self._num_values + 1)
        super().publish()
        self._turns.ring()

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
        return any([lane.serve() for lane in self.lanes])

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

    def abandon(self) -> None:
        """The device does nothing any more, so nothing is on its way: the readers hear of it."""
        for lane in self.lanes:
            lane.abandon()

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once nothing here is used any more, by this process or by a device."""
        if not all([lane.settle() for lane in self.lanes]):
            return False
        for home, event in zip(self._homes, self._ready, strict=False):
            home.driver.destroy_event(event)
        self._ready = []
        return True

    def give_back(self) -> None:
        """Nothing is left once it has settled."""
