"""The reader's side of ``edges.by_copies``, which tells the whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.ring_layout import REPLACED, TENSOR, TENSOR_AHEAD
from crossfade.channels.shm_reader import ReadRecord, ShmReader
from crossfade.channels.values.device_codec import Make
from crossfade.device.borrowed import TensorMaker, tensor_on
from crossfade.device.context import DeviceContext
from crossfade.device.ring_receiver import Leased, RingReceiver
from crossfade.device.signals import Releasable, SignalBoard
from crossfade.device.tensors import stream_getter
from crossfade.edges.by_copies import MOST_KINDS, NEW, NOTE, NUMBER, UNUSED
from crossfade.edges.carrier import Incoming
from crossfade.edges.host_copies import Joiner
from crossfade.edges.lane import LaneReader
from crossfade.edges.layout import Lanes
from crossfade.errors import ChannelBroken, ChannelError
from crossfade.host.doorbell import Bell

_MOST_KNOWN = 256
_NUM_LOOKS = 400  # 25 us, in which a writer that runs has enqueued


class _Record(NamedTuple):
    """A record of a tensor by itself, taken apart."""

    ring: RingReceiver  # by which it comes
    is_enqueued: Callable[[bool], bool]  # see `LaneReader`
    stream: Callable[[], int]  # gives the stream that is going to use it
    generation: int
    slot: int
    size_bytes: int
    make: Callable[[int, Any], torch.Tensor]
    requires_grad: bool


_Prepared: TypeAlias = "tuple[_Record, Leased, torch.Tensor]"
"""A tensor on which nothing may work yet, since its copies may not be enqueued: its record, its slot, itself. The lease is named,
because a tensor without elements does not hold it.
"""


class _Described(NamedTuple):
    """What a reader knows of a kind; ``source`` is the writer's device, by position."""

    source: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


class _KindTable:
    """The kinds of one channel, as one of its ``num_readers`` sees them."""

    def __init__(self, num_readers: int) -> None:
        self._description = NUMBER.size + num_readers * NOTE.size  # where it begins
        self._kinds: dict[int, _Described] = {}

    def find(self, payload: memoryview) -> _Described:
        """The kind of a record's tensor. Raises a ValueError if the record is damaged."""
        (number,) = NUMBER.unpack_from(payload)
        if number & NEW and number ^ NEW < MOST_KINDS:
            self._kinds[number ^ NEW] = _Described(*pickle.loads(payload[self._description :]))
        try:
            return self._kinds[number & ~NEW]
        except KeyError:
            raise ValueError(f"a damaged record names kind {number} of tensors") from None


class IncomingCopies(Incoming):
    """The reader's side."""

    is_direct = True

    def __init__(
        self,
        name: str,
        index: int,
        lanes: Lanes,
        # For each of the writer's devices, the device of this process on which its tensors arrive.
        homes: Sequence[DeviceContext],
        signals: Sequence[SignalBoard],  # of all lanes, as each of those devices sees them
        bell: Bell,
        nudge: Callable[[], None],  # wakes the writer if it waits for a slot
        joiner: Joiner,
        slot_bytes: int = 0,  # length of the slots to set aside now; 0 to make none before the first tensor comes
    ) -> None:
        self.homes = homes
        self._index = index
        self.joiner = joiner
        self.brought = joiner.brought
        self._kinds = _KindTable(lanes.layout.num_readers)
        self.records: dict[bytes, _Record] = {}
        self._prepared: _Prepared | None = None
        self._first_lane = index * lanes.layout.num_sources
        self.lanes = [
            LaneReader(
                home,
                lanes,
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

    def decode(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        return self.joiner.join(message, is_private, self._open_lanes)

    def _open_lanes(self, notes: memoryview) -> Make:
        """Lets the compute stream wait for the parts of a value, and leases their slots."""
        opened: dict[int, Leased] = {}
        for source, lane in enumerate(self.lanes):
            generation, slot, size_bytes = NOTE.unpack_from(notes, (self._first_lane + source) * NOTE.size)
            if generation != UNUSED:
                lease = opened[source] = lane.accept(generation, slot, size_bytes)
                self._num_tensors_copied_out += lease.is_short

        def make(source: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            lease = opened[source]
            tensor = tensor_on(lease.address + offset, shape, dtype, self.homes[source].device, keep=lease)
            if offset + tensor.numel() * tensor.itemsize > lease.size_bytes:
                raise ValueError(f"a tensor at {offset} does not lie within the {lease.size_bytes} bytes of its slot")
            return tensor.clone() if lease.is_short else tensor

        return make

    # A tensor by itself

    @property
    def read_record(self) -> ReadRecord:
        return self._read_record

    def _read_record(self, ring: ShmReader, at: int, kind: int, size: int) -> object:
        if kind == TENSOR_AHEAD:
            return self._read_ahead(ring, at, size)
        if kind == TENSOR:
            return self._complete(self._prepare(ring.payload(at, size)))
        return self._put_back_if_replaced(ring, at)

    def _read_ahead(self, ring: ShmReader, at: int, size: int) -> object:
        """A tensor whose copies may not be enqueued yet. As long as they are not, its record is put back."""
        prepared = self._prepared
        if prepared is not None:
            prepared[1].move_to(prepared[0].stream())  # another one may have been chosen meanwhile
        else:
            try:
                prepared = self._prepared = self._prepare(ring.payload(at, size))
            except ChannelError:
                raise
            except Exception as error:  # the record may be half replaced
                return self._put_back_if_replaced(ring, at, error)
        is_enqueued = prepared[0].is_enqueued
        for _ in range(_NUM_LOOKS):
            if is_enqueued(False):
                break
        else:
            if not ring.is_other_gone:
                ring.put_back()
                return EMPTY
            if not is_enqueued(False):  # it may have told before it ended
                ring.raise_if_ended()
        self._prepared = None
        if ring.words[at >> 3] & 255 != TENSOR_AHEAD:
            return self._put_back_if_replaced(ring, at)
        return self._complete(prepared)

    def forget(self) -> None:
        self._prepared = None

    def _put_back_if_replaced(self, ring: ShmReader, at: int, error: Exception | None = None) -> object:
        """Where a copy could not be enqueued, an error takes the record's place: it is read next. Raises a `ChannelBroken` if it
        does not, so nobody knows which copies the writer's next message is about; or the writer died at it.
        """
        is_gone, kind = ring.is_other_gone, ring.words[at >> 3] & 255
        if kind == TENSOR_AHEAD:
            raise ChannelBroken(f"channel {ring.name} is broken: a record of it cannot be read: {error}") from error
        self._prepared = None
        if kind == REPLACED and is_gone:
            ring.raise_if_ended()
        ring.put_back()
        return EMPTY

    def _prepare(self, payload: bytes) -> _Prepared:
        """Makes the tensor of a record, which nothing may use yet."""
        record = self.records.get(payload) or self._find(payload)
        lease = record.ring.lease_ahead(record.generation, record.slot, record.size_bytes, record.stream(), Leased)
        return record, lease, record.make(lease.address, lease)

    def _complete(self, prepared: _Prepared) -> torch.Tensor:
        """The tensor, whose copies are enqueued, ready for the stream that is going to use it."""
        record, lease, tensor = prepared
        record.ring.expect(lease)
        if lease.is_short:
            self._num_tensors_copied_out += 1
            tensor = tensor.clone()
        return tensor.requires_grad_() if record.requires_grad else tensor

    def _find(self, payload: bytes) -> _Record:
        """What a record of a tensor by itself tells. Equal records come again and again, and are taken apart once."""
        source, dtype, shape, requires_grad = self._kinds.find(memoryview(payload))
        generation, slot, size_bytes = NOTE.unpack_from(payload, NUMBER.size + self._index * NOTE.size)
        if size_bytes != prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {size_bytes} bytes")
        home = self.homes[source]
        make = TensorMaker(shape, dtype, home.device).make
        lane, stream = self.lanes[source], stream_getter(home.device)
        record = _Record(lane.ring, lane.is_enqueued, stream, generation, slot, size_bytes, make, requires_grad)
        if len(self.records) >= _MOST_KNOWN:
            self.records.clear()
        self.records[payload] = record
        return record

    # For the loop, and at the end

    def progress(self) -> bool:
        return any([lane.progress() for lane in self.lanes])

    def signals(self) -> list[Releasable]:
        return [signal for lane in self.lanes for signal in lane.ring.signals()]

    def mute(self, reason: str) -> None:
        for lane in self.lanes:
            lane.mute(reason)

    def refuse(self, reason: str) -> None:
        for lane in self.lanes:
            lane.ring.give_up(reason)

    def leave(self) -> None:
        self._prepared = None
        for lane in self.lanes:
            lane.ring.close()

    def drain(self) -> bool:
        return all([lane.drain() for lane in self.lanes])

    @property
    def is_referenced(self) -> bool:
        return not all(lane.ring.is_empty for lane in self.lanes)

    def statistics(self, ring: ShmReader) -> ChannelStatistics:
        """Slots are those of the lanes."""
        whole = ring.statistics()
        lanes = [lane.ring.statistics() for lane in self.lanes]
        return ChannelStatistics(
            whole.num_values,
            whole.num_bytes + sum(lane.num_bytes for lane in lanes),
            num_copied_out=whole.num_copied_out + self._num_tensors_copied_out,
            num_slots=sum(lane.num_slots for lane in lanes if lane.num_generations),
            slot_bytes=sum(lane.num_slots * lane.slot_bytes for lane in lanes),
            num_kept=whole.num_kept + sum(lane.num_leased for lane in lanes),
        )
