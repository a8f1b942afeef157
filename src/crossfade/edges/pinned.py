"""The slots of rings whose memory a device reaches: its copy engine writes into those of a writer and reads from those of a reader.

Pinning is slow (milliseconds a megabyte), and giving it up waits for the device. So a piece of a heap is pinned when it is
first needed, stays pinned as long as it is a slot, and is given up when no stream of ours has anything to do.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from crossfade.channels.ring_layout import RingBlock
from crossfade.channels.slots import Mapped, ReaderSlots, WriterSlots
from crossfade.device.context import DeviceContext
from crossfade.device.driver import HostRange
from crossfade.device.events import EventPool, PooledEvent
from crossfade.errors import DeviceError
from crossfade.host.memory import Heap, Memory, address_of


class Pins:
    """Host memory that is pinned for the devices of this process. (What is pinned for one is for all.)"""

    def __init__(self, homes: Sequence[DeviceContext]) -> None:
        self._homes = homes
        self._dropped: deque[HostRange] = deque()

    def pin(self, memory: Memory, offset: int, size_bytes: int, label: str) -> HostRange:
        """Pins a piece. Raises a `DeviceError` if there is no memory that can be pinned."""
        self.collect()
        return self._homes[0].driver.map_host(memory, offset, size_bytes, label)

    def drop(self, piece: HostRange | None) -> None:
        """Nothing new will be enqueued for it; it is given up when the devices are idle. None: there is nothing to give up."""
        if piece is not None:
            self._dropped.append(piece)

    def collect(self) -> bool:
        """Gives up what was dropped, if that does not have to wait; whether it does. A device that refuses to say so keeps it."""
        if not self._dropped:
            return False
        with suppress(DeviceError):
            if not all(home.is_idle() for home in self._homes):
                return True
            self.close()
        return False

    def close(self) -> None:
        """Gives up what was dropped; waits for the devices."""
        while self._dropped:
            self._dropped.popleft().close()


def has_come(event: PooledEvent) -> bool:
    """Whether a device reads nothing any more of what it was given until then: it is that far, or never will be."""
    try:
        return event.has_come()
    except DeviceError:
        return True


class PinnedWriterSlots(WriterSlots):
    """Slots that a device may write into."""

    def __init__(self, heap: Heap, block: RingBlock, pins: Pins, label: str) -> None:
        super().__init__(heap, address_of(block.board, block.offset), block.layout)
        # Slots that were taken, and that readers will not free. Any thread may add to them.
        self.unused: list[int] = []
        self._pins = pins
        self._label = label
        self._pinned: dict[int, HostRange] = {}  # by slot

    def address(self, slot: int) -> int:
        """The slot's address for a device. Raises a `DeviceError` if it cannot be pinned."""
        pinned = self._pinned.get(slot)
        if pinned is None:
            offset, capacity, _ = self._pieces[slot]
            pinned = self._pinned[slot] = self._pins.pin(self._heap.memory, offset, capacity, self._label)
        return pinned.address

    def take(self, size_bytes: int) -> tuple[int, int, int, mmap.mmap]:
        while self.unused:
            self.put_back(self.unused.pop())
        return super().take(size_bytes)

    def set_aside(self, num_slots: int, size_bytes: int) -> None:
        """Makes slots before they are needed, and pins them."""
        super().set_aside(num_slots, size_bytes)
        try:
            for slot in range(self.num_slots):
                self.address(slot)
        except BaseException:
            self.close()
            raise

    def _grow(self, slot: int, size_bytes: int) -> None:
        super()._grow(slot, size_bytes)
        self._pins.drop(self._pinned.pop(slot, None))

    def close(self) -> None:
        """Releases the memory, on which no copies may be under way."""
        super().close()
        for slot in list(self._pinned):
            self._pins.drop(self._pinned.pop(slot, None))


class PinnedReaderSlots(ReaderSlots):
    """Slots that a device may read from, as one reader sees them.

    A view may be the source of a copy that is enqueued and has not run (``tensor.to("cuda:1", non_blocking=True)``). So when the
    last view of a slot dies, the slot is *ending*, and free once each device's compute stream has done all that it was given until
    then.
    """

    def __init__(
        self, memory: Memory, block: RingBlock, homes: Sequence[tuple[DeviceContext, EventPool]], pins: Pins, label: str
    ) -> None:
        super().__init__(memory, block.board, address_of(block.board, block.offset), block.layout)
        self._homes = homes
        self._pins = pins
        self._label = label
        self._pinned: dict[int, HostRange] = {}  # by offset in the heap
        self._streams: dict[int, tuple[int, ...]] = {}  # slot: of each device, the stream on which its views are used
        self._ending: dict[
            int, tuple[PooledEvent, ...] | None
        ] = {}  # by slot: those to come; None while a stream is captured
        self._is_closed = False

    @property
    def num_kept(self) -> int:
        """Slots on which views are alive, or from which a device may still read."""
        return len(self._kept) + len(self._ending)

    @property
    def next_end(self) -> tuple[PooledEvent, ...]:
        """When the first of the slots that are ending will be free; empty if there is none, or if that cannot be told yet."""
        return next((events for events in list(self._ending.values()) if events is not None), ())

    def view(self, slot: int, offset: int, capacity: int, size: int) -> memoryview:
        view = super().view(slot, offset, capacity, size)
        self._streams[slot] = tuple([home.compute_stream() for home, _ in self._homes])
        return view

    def end_at_once(self, slot: int) -> None:
        """No view of the slot was given to a program that enqueues copies itself: it is free when the last view dies."""
        self._streams.pop(slot, None)

    def _died(self, slot: int, exporter: object) -> None:
        streams = self._streams.pop(slot, None)
        if streams is None or self._is_closed or self.is_foreign:
            super()._died(slot, exporter)
            return
        events = self._end_of(streams)
        if events == ():
            super()._died(slot, exporter)
            return
        if events is None:
            self._streams[slot] = streams
        self._ending[slot] = events
        del self._kept[
            slot
        ]  # last: it is kept or ending at any time, whichever thread looks, and `collect` waits for this

    def _end_of(self, streams: tuple[int, ...]) -> tuple[PooledEvent, ...] | None:
        """The end of all that the streams were given; None while one is captured: in the graph that would be at each replay. A
        device that refuses will never read anything again, and the others may.
        """
        ends: list[PooledEvent] = []
        for (home, events), stream in zip(self._homes, streams, strict=True):
            with suppress(DeviceError):
                if home.driver.is_capturing(stream):
                    return None
                ends.append(events.at(stream, is_waited=True))
        return tuple(ends)

    def collect(self) -> None:
        """Frees the slots from which the device has read."""
        for slot, events in list(self._ending.items()):
            if slot in self._kept:
                continue
            if events is None:
                events = self._end_of(self._streams[slot])
            if events is not None:
                events = tuple([event for event in events if not has_come(event)])
            self._ending[slot] = events
            if events == ():
                del self._ending[slot]
                self._streams.pop(slot, None)
                self._frees[slot]()

    def _map(self, slot: int, offset: int, capacity: int) -> Mapped:
        if slot in self._ending:
            raise ValueError(f"a damaged record names slot {slot}, which was not freed")
        before = self._mapped.get(slot)
        mapped = super()._map(slot, offset, capacity)
        if before is not None and before is not mapped:
            self._pins.drop(self._pinned.pop(before.offset, None))
        return mapped

    def _map_piece(self, offset: int, capacity: int) -> mmap.mmap | memoryview:
        """The memory, pinned if it can be: a copy from memory that is not is slower, and right."""
        try:
            pinned = self._pins.pin(self._memory, offset, capacity, self._label)
        except DeviceError:
            return super()._map_piece(offset, capacity)
        self._pinned[offset] = pinned
        return pinned.view()

    def close(self) -> None:
        """What is read from by a device stays pinned until that is over."""
        self._is_closed = True
        super().close()
        self._ending.clear()
        for offset in list(self._pinned):
            self._pins.drop(self._pinned.pop(offset, None))
