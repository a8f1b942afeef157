"""The reading end of a shared-memory ring in a process that has devices."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import ShmReader
from crossfade.channels.values.codec import decode
from crossfade.channels.values.tensors import Place, tensor_of
from crossfade.device.moments import Moment
from crossfade.device.recorded import Site
from crossfade.edges.host_copies import CopiesIn, HostCopies
from crossfade.edges.pinned import PinnedReaderSlots, has_come
from crossfade.errors import DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory

__all__ = ["HostToDeviceReader"]


class HostToDeviceReader(ShmReader):
    """A `ShmReader` that can bring tensors to the process's device; its writer is any.

    CPU tensors and arrays are views on their slot, as in a `ShmReader`, and the slot is pinned: ``tensor.to("cuda",
    non_blocking=True)`` is one copy by the engine. Tensors that are wanted on the device are copied there from the slot, which
    is free when that is done.

    A slot from which the device still reads counts as kept. When those and the kept ones are all that the reader may keep, the
    next value waits for the device instead of being copied out, which would take the host longer.

    Args:
        name, board, offset, layout, index, heap_memory, bell: see `ShmReader`.
        copies: what the channels of this process share.
        device: which tensors are brought to the device: "cuda" for all, "default" for those that lay on a device at the writer,
        "cpu" for none.

    Attributes:
        brought: the copies onto the device, for who records them.
    """

    def __init__(
        self,
        name: str,
        board: mmap.mmap,
        offset: int,
        layout: RingLayout,
        index: int,
        heap_memory: Memory,
        bell: Bell,
        copies: HostCopies,
        *,
        device: str = "default",
    ) -> None:
        super().__init__(name, board, offset, layout, index, heap_memory, bell)
        self.brought = Site()
        self._copies = copies
        self._brings_all, self._brings_back = device == "cuda", device != "cpu"
        homes = [(home, copies.moments(home)) for home in copies.homes]
        self._pinned = PinnedReaderSlots(heap_memory, board, self._base, layout, homes, copies.pins, f"slots of {name}")
        self._slots = self._pinned
        self._arriving: deque[tuple[Moment, list[Any]]] = deque()  # ends of copies, and what they read from
        self._is_waiting = False  # for the device, to be told when it has read from a slot

    def try_read(self) -> object:
        """See the protocol."""
        if self._arriving or self._pinned.num_kept >= self.layout.depth:
            self.collect()
            if self._has_to_wait():
                return EMPTY
        return super().try_read()

    def collect(self) -> None:
        """Lets go of slots from which the device has read. The loop need not call it."""
        while self._arriving and has_come(self._arriving[0][0]):
            self._arriving.popleft()
        self._pinned.collect()

    def _has_to_wait(self) -> bool:
        """Whether the next value needs a slot's share which the device will give back by itself."""
        if self._is_closed or self._pinned.num_kept < self.layout.depth or self.is_idle():
            return False
        moments = (self._arriving[0][0],) if self._arriving else self._pinned.next_end
        if not moments:
            return False
        if not self._is_waiting:
            self._is_waiting = True
            self._copies.publisher.submit(moments, self._stop_waiting)  # so that the loop, if asleep by then, is woken
        return True

    def _stop_waiting(self, error: DeviceError | None) -> None:
        self._is_waiting = False

    def _decode_copy(self, message: bytearray) -> object:
        return _Arrival(self, is_pinned=False).decode(memoryview(message), private=_itself)

    def _decode_view(self, slot: int, view: memoryview) -> object:
        arrival = _Arrival(self, is_pinned=True)
        try:
            return arrival.decode(view, private=bytearray if self._shares else _itself)
        finally:
            if not arrival.num_views:
                self._pinned.end_at_once(slot)

    def close(self) -> None:
        """See the protocol. What the device still reads from stays until it has."""
        super().close()
        while self._arriving:
            moment, sources = self._arriving.popleft()
            self._copies.publisher.submit((moment,), _nothing, keep=sources)

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        if not self._is_closed:
            self.collect()
        return super().statistics()


class _Arrival:
    """A value whose tensors are brought to where they are wanted.

    Attributes:
        num_views: buffers of which the value holds views.
    """

    def __init__(self, reader: HostToDeviceReader, *, is_pinned: bool) -> None:
        self._reader = reader
        self._copies = reader._copies
        self._is_pinned = is_pinned
        self._copies_in = CopiesIn(reader._copies, reader.brought.around)
        self.num_views = 0

    def decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        """The value; ``private`` makes of a buffer what a CPU tensor lies on."""

        def place(data: memoryview) -> Place:
            def make(dtype: torch.dtype, shape: tuple[int, ...], was_on_device: bool) -> torch.Tensor:
                if self._reader._brings_all or (was_on_device and self._reader._brings_back):
                    return self._bring(data, dtype, shape)
                self.num_views += 1
                return tensor_of(private(data), dtype, shape)

            return make

        try:
            return decode(message, private=place, shared=self._share)
        finally:
            if self._copies_in.sources:
                self._reader._arriving.append((self._copies_in.end(), self._copies_in.sources))

    def _share(self, data: memoryview) -> memoryview:
        self.num_views += 1
        return data.toreadonly()

    def _bring(self, data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._copies.empty(dtype, shape)
        if tensor.nbytes != data.nbytes:
            raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {data.nbytes} bytes")
        if data.nbytes:
            self._copies_in.add(tensor, data if self._is_pinned else self._copies.pinned(data))
        return tensor


def _itself(view: memoryview) -> memoryview:
    return view


def _nothing(error: DeviceError | None) -> None:
    """What the job holds is let go of."""
