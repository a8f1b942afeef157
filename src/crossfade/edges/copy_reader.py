"""The reading end of the copy-engine channel (``edges.copy_engine`` tells the whole)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import INLINE_BYTES, WRITER_GONE, ShmReader
from crossfade.channels.values.device_codec import Make, join
from crossfade.device.borrowed import TensorMaker, tensor_on
from crossfade.device.home import DeviceHome
from crossfade.device.recorded import Recorded, Site
from crossfade.device.ring_receiver import Leased, RingReceiver
from crossfade.device.signals import Releasable, SignalBoard
from crossfade.device.tensors import stream_getter
from crossfade.edges.lane import LaneReader
from crossfade.edges.layout import DeviceLayout
from crossfade.edges.tensor_path import AHEAD, BARE, NOTE, NUMBER, REPLACED, UNUSED, KindTable
from crossfade.errors import ChannelBroken, ChannelError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory

if TYPE_CHECKING:
    import torch

    from crossfade.edges.host_copies import HostCopies

__all__ = ["CopyReader"]

_MOST_TOLD = 256
_NUM_LOOKS = 400  # 25 us, in which a writer that runs has enqueued


class _Told(NamedTuple):
    """A record of a tensor by itself, taken apart.

    Attributes:
        ring: by which it comes.
        is_enqueued: see `LaneReader`.
        stream: gives the stream that is going to use it.
        generation, slot, size_bytes: where.
        make: makes the tensor.
        requires_grad: of the tensor.
    """

    ring: RingReceiver
    is_enqueued: Callable[[bool], bool]
    stream: Callable[[], int]
    generation: int
    slot: int
    size_bytes: int
    make: Callable[[int, Any], torch.Tensor]
    requires_grad: bool


_Prepared: TypeAlias = "tuple[_Told, Leased, torch.Tensor]"
"""A tensor on which nothing may work yet, since its copies may not be enqueued: its record, its slot, itself. The lease is named,
because a tensor without elements does not hold it.
"""


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

    Attributes:
        brought: those copies, for who records them.
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
        self._told: dict[bytes, _Told] = {}
        self._prepared: _Prepared | None = None
        self._copies = copies
        self.brought = Site()
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
        if kind == AHEAD:
            return self._read_ahead(at, size)
        if kind == REPLACED:
            return self._put_back_if_replaced(at)
        if kind != BARE:
            return super()._read_message(at, kind, size)
        return self._complete(self._prepare(at, size))

    def _read_ahead(self, at: int, size: int) -> object:
        """A tensor whose copies may not be enqueued yet. As long as they are not, its record is put back."""
        prepared = self._prepared
        if prepared is not None:
            prepared[1].move_to(prepared[0].stream())  # somebody may have chosen another one meanwhile
        else:
            try:
                prepared = self._prepared = self._prepare(at, size)
            except ChannelError:
                raise
            except Exception as error:  # the record may be half replaced
                return self._put_back_if_replaced(at, error)
        is_enqueued = prepared[0].is_enqueued
        for _ in range(_NUM_LOOKS):
            if is_enqueued(False):
                break
        else:
            if not self._state[WRITER_GONE]:
                self._put_back()
                return EMPTY
            if not is_enqueued(False):  # it may have told before it ended
                self._raise_if_ended()
        self._prepared = None
        if self._words[at >> 3] & 255 != AHEAD:
            return self._put_back_if_replaced(at)
        return self._complete(prepared)

    def _raise_if_ended(self) -> None:
        if self._prepared is not None and (self._is_closed or self._state[WRITER_GONE]):
            self._prepared = None  # its copies never come
        super()._raise_if_ended()

    def _put_back_if_replaced(self, at: int, error: Exception | None = None) -> object:
        """Where a copy could not be enqueued, an error takes the record's place: it is read next.

        Raises:
            ChannelBroken: it was not, so nobody knows what the writer's next word on copies is about; or the writer died at it.
        """
        is_gone, kind = self._state[WRITER_GONE], self._words[at >> 3] & 255
        if kind == AHEAD:
            raise ChannelBroken(f"channel {self.name} is broken: a record of it cannot be read: {error}") from error
        self._prepared = None
        if kind == REPLACED and is_gone:
            self._raise_if_ended()
        self._put_back()
        return EMPTY

    def _prepare(self, at: int, size: int) -> _Prepared:
        """Makes the tensor of a record, which nothing may use yet."""
        payload = self._board[at + 8 : at + 8 + min(size, INLINE_BYTES)]
        told = self._told.get(payload) or self._find(payload)
        lease = told.ring.lease_ahead(told.generation, told.slot, told.size_bytes, told.stream(), Leased)
        return told, lease, told.make(lease.address, lease)

    def _complete(self, prepared: _Prepared) -> torch.Tensor:
        """The tensor, whose copies are enqueued, ready for the stream that is going to use it."""
        told, lease, tensor = prepared
        told.ring.expect(lease)
        if lease.is_short:
            self._num_tensors_copied_out += 1
            tensor = tensor.clone()
        return tensor.requires_grad_() if told.requires_grad else tensor

    def _find(self, payload: bytes) -> _Told:
        """What a record of a tensor by itself tells. Equal records come again and again, and are taken apart once."""
        source, dtype, shape, requires_grad = self._kinds.find(memoryview(payload))
        generation, slot, size_bytes = NOTE.unpack_from(payload, NUMBER.size + self._index * NOTE.size)
        if size_bytes != prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {size_bytes} bytes")
        home = self._homes[source]
        make = TensorMaker(shape, dtype, home.device).make
        lane, stream = self.lanes[source], stream_getter(home.device)
        told = _Told(lane.ring, lane.is_enqueued, stream, generation, slot, size_bytes, make, requires_grad)
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[payload] = told
        return told

    def _decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        if self._copies is None:
            return join(message, self._open_lanes, private=private, shared=memoryview.toreadonly)
        from crossfade.edges.brought import Brought

        brought = Brought(self._copies, self.brought.around)
        try:
            return join(message, self._open_lanes, private=brought.place, shared=memoryview.toreadonly)
        finally:
            brought.end()

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
            tensor = tensor_on(lease.address + offset, shape, dtype, self._homes[source].device, keep=lease)
            if offset + tensor.numel() * tensor.itemsize > lease.size_bytes:
                raise ValueError(f"a tensor at {offset} does not lie within the {lease.size_bytes} bytes of its slot")
            return tensor.clone() if lease.is_short else tensor

        return make

    def serve(self) -> bool:
        """Sees to what is not on a value's way; in the loop, after the doorbell rang. Whether it should soon be called again."""
        return any([lane.serve() for lane in self.lanes])

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
        self._prepared = None
        for lane in self.lanes:
            lane.ring.close()

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once no value can come any more and the devices are done with those that
        came.

        Tensors that the program kept stay good; `serve` gives their memory back when they are gone (`is_empty`).
        """
        return all([lane.settle() for lane in self.lanes])

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
