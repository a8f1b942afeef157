"""Carries tensors by copy engines: from the writer's device straight into slots in each reader's device memory.

Device tensors of a value stay out of its message (``channels.values.device_codec``) and go through a *lane* (``edges.lane``) to
each reader. The message notes which slot each lane fills.

PL-5: the record is published after the copies into every reader's slot, and the settings of ``full`` behind them, are enqueued.
What can fail comes before: room in the ring, a slot in every lane, memory for the message. A reader that has the record enqueues
a wait for ``full`` and gives the tensors away as views on their slots, computed or not. No host waits for a device.

The record of a tensor by itself goes *ahead*: it is published before the copies are enqueued, which takes the writer's host 10 us,
and a semaphore tells when they are. The reader makes the tensor meanwhile, and enqueues its wait when it has been told, so PL-5
holds. Where a copy could not be enqueued, the record says so by then.

Such a record, which most values have, is no pickle. Tensors of one type, shape and device are of one *kind*. The first of a kind
tells the reader what the kind is; the others name it by its number. The payload is::

    u32 number of the kind, with NEW for its first tensor | for each reader: u32 generation | u32 slot | u64 length
    | for its first tensor: the pickle of (the writer's device, by position, dtype, shape, requires_grad)

Where the device is the CPU (`crossfade.device.driver.HOST`), CPU tensors go the same way.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import torch

from crossfade.channels.ring_layout import INLINE_BYTES, TENSOR, TENSOR_AHEAD
from crossfade.channels.shm_ring import ShmWriter, silent
from crossfade.channels.values.device_codec import Split, dense
from crossfade.channels.values.tensors import is_dense
from crossfade.device.context import DeviceContext
from crossfade.device.recorded import Recorded
from crossfade.device.signals import Releasable, SignalBoard
from crossfade.device.tensors import stream_getter
from crossfade.edges.carrier import Outgoing
from crossfade.edges.lane import LaneWriter
from crossfade.edges.layout import Lanes
from crossfade.edges.sources import Sources, short_failure
from crossfade.edges.turns import Turns
from crossfade.errors import CrossfadeError, DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.semaphore import FENCE_AFTER_POST, full_fence

NUMBER = struct.Struct("<I")
NOTE = struct.Struct("<IIQ")  # of each lane: the generation and the slot of its part of the value, and its length

UNUSED = 0xFFFF_FFFF  # what stands for the generation in the note of a lane that a value does not take

NEW = 1 << 31
MOST_KINDS = 256  # Of one channel. Tensors of further ones are sent as other values are.

_MOST_DESCRIPTION_BYTES = 256
"""Of a kind. Tensors of so many dimensions that it would take more are sent as other values are."""

_MOST_MADE = 64  # records of one kind that are kept: as long as slots do not change, the same ones come again and again

_Key: TypeAlias = tuple[torch.device, torch.dtype, torch.Size, bool, torch.layout]


@dataclass(slots=True)
class _Kind:
    """What tensors have in common."""

    number: int  # by which the record names it
    source: int  # the writer's device, by position
    size_bytes: int
    description: bytes  # what the first tensor tells
    is_known: bool = False  # to the readers: a tensor of the kind was published
    _made: dict[tuple[tuple[int, int], ...], bytes] = field(default_factory=dict)

    def record_for(self, places: Sequence[tuple[int, int]]) -> bytes:
        """The payload of a tensor's record, with the (generation, slot) that it takes in the lane to each reader."""
        key = tuple(places)
        if self.is_known and (made := self._made.get(key)):
            return made
        notes = b"".join([NOTE.pack(*place, self.size_bytes) for place in places])
        if not self.is_known:
            return NUMBER.pack(self.number | NEW) + notes + self.description
        if len(self._made) >= _MOST_MADE:
            self._made.clear()
        record = self._made[key] = NUMBER.pack(self.number) + notes
        return record


class _Kinds:
    """The kinds of one channel, at its writer. ``source_of``: the position of a tensor's device; None if it is on none."""

    def __init__(self, source_of: Callable[[torch.Tensor], int | None]) -> None:
        self._source_of = source_of
        self._kinds: dict[_Key, _Kind | None] = {}

    def of(self, value: object) -> _Kind | None:
        """The kind of a value, if it is a tensor that goes beside its record."""
        if type(value) is not torch.Tensor or value.is_nested:  # which has no shape
            return None
        key = (value.device, value.dtype, value.shape, value.requires_grad, value.layout)
        try:
            return self._kinds[key]
        except KeyError:
            return self._new(key, value)

    def _new(self, key: _Key, tensor: torch.Tensor) -> _Kind | None:
        if len(self._kinds) >= MOST_KINDS:
            return None
        source = self._source_of(tensor) if is_dense(tensor) else None
        if source is None:
            return None
        _, dtype, shape, requires_grad, _ = key
        description = pickle.dumps((source, dtype, tuple(shape), requires_grad), 5)
        if len(description) > _MOST_DESCRIPTION_BYTES:
            return None
        kind = _Kind(len(self._kinds), source, tensor.numel() * tensor.itemsize, description)
        self._kinds[key] = kind
        return kind


class OutgoingCopies(Outgoing):
    """The writer's side."""

    ring: ShmWriter

    def __init__(
        self,
        ring: ShmWriter,
        lanes: Lanes,
        homes: Sequence[DeviceContext],  # the devices of this process, in their order
        signals: Sequence[SignalBoard],  # of all lanes, as each of those devices sees them
        bells: Sequence[Bell],  # the readers' doorbells, in the order of the readers
        *,
        # Of its lanes among those of other writers; None if nobody else pushes to its readers.
        turns: Turns | None = None,
        actor: str = "",
        node: str = "",
    ) -> None:
        self.ring = ring
        self._where = (actor, f"{node or f'the value of channel {ring.name}'}, copying it to its readers' devices,")
        self._has_failed = False
        self.homes = homes
        self.turns = turns
        num_sources, num_lanes = lanes.layout.num_sources, lanes.layout.num_lanes
        self.lanes = [
            LaneWriter(
                homes[lane % num_sources],
                lanes,
                lane,
                signals[lane % num_sources],
                bells[lane // num_sources],
                f"{ring.name} to reader {lane // num_sources}",
            )
            for lane in range(num_lanes)
        ]
        self.sources = Sources(homes, num_lanes * NOTE.size)
        self._unused = NOTE.pack(UNUSED, 0, 0)
        self._pending: tuple[object, torch.Tensor] | None = None  # a tensor that there was no room for yet
        self.kinds = _Kinds(self.sources.source_of)
        self._lanes_from = [self.lanes[source::num_sources] for source in range(num_sources)]
        self._rings_from = [[lane.ring for lane in each] for each in self._lanes_from]
        self._compute = [stream_getter(home.device) for home in homes]
        self._fence = full_fence()
        self.tells_from = [
            [(lane.tell_enqueued, bell.flags, bell.ring) for lane, bell in zip(each, bells, strict=True)]
            for each in self._lanes_from
        ]
        self._are_records_short = NUMBER.size + len(bells) * NOTE.size + _MOST_DESCRIPTION_BYTES <= INLINE_BYTES
        if turns is not None:  # those after this channel hear of each value, with tensors or without
            numbers = count(1)
            ring.posts = [silent(lambda: turns.tell(next(numbers))), *ring.posts, silent(turns.ring)]

    @property
    def try_send_tensor(self) -> Callable[[object], bool | None] | None:
        return self._try_send_tensor if self._are_records_short else None

    def _try_send_tensor(self, value: object) -> bool | None:
        kind = self.kinds.of(value)
        if kind is None:
            return None
        if self._pending is None and self.turns is None and self._is_ready_for(kind):
            self._send_ahead(value, kind)
            return True
        return self._try_send_behind(value, kind)

    def _is_ready_for(self, kind: _Kind) -> bool:
        """A quick look: whether there is room for a tensor by itself."""
        is_ready = self.ring.has_room()
        for ring in self._rings_from[kind.source]:
            is_ready = is_ready and ring.has_slot(kind.size_bytes)
        return is_ready

    def _send_ahead(self, tensor: Any, kind: _Kind) -> None:
        """Writes a tensor by itself where there is room; what else there is to do comes when it is on its way."""
        ring, source, size_bytes = self.ring, kind.source, kind.size_bytes
        rings, at = self._rings_from[source], ring.at
        is_whole = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        whole = (
            tensor if is_whole else dense(tensor)
        )  # which looks at the same, with a call more on the way of each tensor
        ready = self.sources.ready[source]
        ring.stage_record(TENSOR_AHEAD, kind.record_for([each.place_of_next() for each in rings]))
        kind.is_known = True
        try:
            ring.publish()  # the readers prepare meanwhile; there are no turns
            self.homes[source].driver.record_event(ready, self._compute[source]())
            parts = ((0, whole.data_ptr(), size_bytes),)
            for each in rings:
                each.send(parts, size_bytes, ready=ready, keep=whole)
        except BaseException as error:
            self._fail(error, at)
            if not isinstance(error, CrossfadeError):
                raise
        finally:
            for tell, flags, ring_bell in self.tells_from[source]:
                tell()
                if FENCE_AFTER_POST:
                    self._fence()
                if flags[0]:
                    ring_bell()
        for lane in self._lanes_from[source]:
            lane.tidy()

    def _try_send_behind(self, tensor: Any, kind: _Kind) -> bool:
        """Writes a tensor by itself; its record is published behind the copies."""
        source, size_bytes = kind.source, kind.size_bytes
        if self._pending is not None and self._pending[0] is tensor:
            whole = self._pending[1]
        else:
            whole = dense(tensor)
            self.sources.mark_ready(source)
            self._pending = (tensor, whole)
        try:
            if not (self.ring.has_room() and self._may_push({source: size_bytes})):
                return False
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        self.ring.stage_record(TENSOR, kind.record_for([each.place_of_next() for each in self._rings_from[source]]))
        self._push(source, ((0, whole.data_ptr(), size_bytes),), size_bytes, whole)
        kind.is_known = True
        self.ring.publish()
        return True

    # Any value

    def split(self, value: object) -> Split:
        return self.sources.split(value)

    def try_send(self, parts: Split) -> bool:
        if not self._may_push(parts.lane_bytes):
            return False
        self._note(parts)
        self.ring.stage(parts.message)
        for source, size_bytes in parts.lane_bytes.items():
            if self._has_failed:
                break
            places = [
                (each.offset, each.tensor.data_ptr(), each.size_bytes) for each in parts.tensors if each.lane == source
            ]
            self._push(source, places, size_bytes, parts)
        self.ring.publish()
        return True

    def _may_push(self, lane_bytes: dict[int, int]) -> bool:
        """Whether every lane has a slot for its part, and it is this channel's turn; if not, the bell rings when it may be."""
        if not all([self._have_slots(self._lanes_from[source], size) for source, size in lane_bytes.items()]):
            return False
        return self.turns is None or not self.turns.must_hold(self.ring.num_values + 1, lane_bytes)

    def _have_slots(self, lanes: Sequence[LaneWriter], size_bytes: int) -> bool:
        if all([lane.can_send(size_bytes) for lane in lanes]):
            return True
        self.ring.ask_to_be_rung()  # what came before this was seen has rung nobody: look once more
        return all([lane.can_send(size_bytes) for lane in lanes])

    def _note(self, parts: Split) -> None:
        """Writes into the message which slot each lane is going to fill."""
        for lane, end in enumerate(self.lanes):
            size_bytes = parts.lane_bytes.get(lane % len(self.homes))
            note = self._unused if size_bytes is None else NOTE.pack(*end.ring.place_of_next(), size_bytes)
            parts.notes[lane * NOTE.size : (lane + 1) * NOTE.size] = note

    def _push(self, source: int, places: Sequence[tuple[int, int, int]], size_bytes: int, keep: Any) -> None:
        """Enqueues what lies on one of the devices, to every reader; those where it is not its turn yet come last."""
        turns, ready = self.turns, self.sources.ready[source]
        try:
            if turns is None:
                for each in self._rings_from[source]:
                    each.send(places, size_bytes, ready=ready, keep=keep)
                return
            number, stream = self.ring.num_values + 1, self.homes[source].push_stream
            for lane in turns.in_turn(range(source, len(self.lanes), len(self.homes)), number, size_bytes):
                turns.wait(lane, number, size_bytes, stream)
                self.lanes[lane].ring.send(places, size_bytes, ready=ready, keep=keep)
                turns.mark(lane, number, size_bytes, stream)
        except CrossfadeError as error:
            self._fail(error, self.ring.at)

    def _fail(self, error: BaseException, at: int) -> None:
        """Some lanes may have got the value of the record at ``at``, so none can continue: its readers get an error in its place,
        and the next try to write raises.
        """
        text = f"a copy could not be enqueued: {str(error) or type(error).__name__}"
        self.ring.replace(at, short_failure(DeviceError(f"channel {self.ring.name}: {text}"), *self._where))
        self._has_failed = True
        self.ring.break_off(text)
        self.refuse(text)

    # For the loop, and at the end

    @property
    def recorded(self) -> Sequence[Recorded]:
        return [lane.ring for lane in self.lanes]

    def is_flushed(self) -> bool:
        return all(lane.ring.is_done for lane in self.lanes)

    def progress(self) -> bool:
        return any([lane.progress() for lane in self.lanes])

    def _lanes_to(self, reader: int) -> Sequence[LaneWriter]:
        num_sources = len(self.homes)
        return self.lanes[reader * num_sources : (reader + 1) * num_sources]

    def signals(self, reader: int) -> list[Releasable]:
        return [signal for lane in self._lanes_to(reader) for signal in lane.ring.signals()]

    def mute(self, reader: int, reason: str) -> None:
        for lane in self._lanes_to(reader):
            lane.mute(reason)

    def refuse(self, reason: str) -> None:
        for lane in self.lanes:
            lane.ring.give_up(reason)

    def leave(self) -> None:
        self._pending = None
        self.ring.leave()

    def notify(self) -> None:
        for lane in self.lanes:
            lane.notify()

    def drain(self) -> bool:
        if not all([lane.drain() for lane in self.lanes]):
            return False
        self.sources.close()
        return True
