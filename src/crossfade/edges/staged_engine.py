"""The staged channel: a shared-memory ring, and beside it lanes that take device tensors through pinned memory of the host.

The ring carries every value's message without the tensors that lie on a device of the writer's, as that of the copy channel does
(``edges.copy_engine``). These go through a lane to each reader, in chunks (``device.staged``), of which a value may need many
more than there are: both hosts go on in their loops (`serve`), and neither waits for its device.

The writer publishes a value's record at once, and enqueues as many chunks as are free. The reader takes the record when its
program has asked for the value (`try_start`): then it takes memory of torch's and enqueues the copies into it. The value is there
when all of them are enqueued (PL-5). Then it is put together, and the compute stream waits for the last copy.

A reader that has no memory lets the chunks go by, and gets a `Failure` in the place of the value. A value without device tensors
costs no lane anything. Where the device is the CPU, CPU tensors go the same way.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.values.device_codec import Split
from crossfade.device.home import DeviceHome
from crossfade.device.recorded import Recorded
from crossfade.device.signals import Releasable
from crossfade.edges.apart import ApartReader, ApartWriter, Places
from crossfade.edges.arrivals import Arriving
from crossfade.edges.layout import DeviceLayout
from crossfade.edges.staged_lane import Chunks, StagedLaneReader, StagedLaneWriter, all_or_none
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory

if TYPE_CHECKING:
    from crossfade.edges.host_copies import HostCopies

__all__ = ["StagedReader", "StagedWriter"]

_NOTE = struct.Struct("<Q")
"""Of each of the writer's devices: how many bytes of the value come from there."""


class StagedWriter(ApartWriter):
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
        num = layout.num_sources
        super().__init__(name, board, offset, ring, heap, bells, homes=homes, note_bytes=num * _NOTE.size)
        self.lanes = all_or_none(
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
        )

    def _note(self, notes: bytearray, places: Places) -> None:
        for source, each in places.items():
            _NOTE.pack_into(notes, source * _NOTE.size, each[-1][0] + each[-1][2])

    def _send(self, parts: Split, places: Places, ready: Sequence[int]) -> None:
        for lane, end in enumerate(self.lanes):
            source = lane % len(self.homes)
            if source in places:
                end.send(places[source], ready[source], parts)

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
        return any([lane.serve() for lane in self.lanes])

    @property
    def recorded(self) -> Sequence[Recorded]:
        """What enqueues its copies, by lane."""
        return [lane.sender for lane in self.lanes]

    def signals(self, reader: int) -> list[Releasable]:
        """What a reader sets and streams of this process may wait for. Any thread may ask."""
        return [signal for lane in self._lanes_to(reader) for signal in lane.signals()]

    def _lanes_to(self, reader: int) -> list[StagedLaneWriter]:
        num_sources = len(self.homes)
        return self.lanes[reader * num_sources : (reader + 1) * num_sources]

    def give_up(self, reason: str) -> None:
        """See `ApartWriter`."""
        super().give_up(reason)
        for lane in self.lanes:
            lane.sender.break_off(reason)

    def lose(self, reader: int, reason: str) -> None:
        """A reader is gone: nothing is told to it any more. The others get nothing more either."""
        for lane in self._lanes_to(reader):
            lane.break_off(reason)
        self.give_up(reason)

    def settle(self) -> bool:
        """See `ApartWriter`."""
        return all([lane.settle() for lane in self.lanes]) and super().settle()

    def give_back(self) -> None:
        """See `ApartWriter`."""
        for lane in self.lanes:
            lane.give_back()


class StagedReader(ApartReader):
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
        copies: see `ApartReader`.
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
        copies: HostCopies | None = None,
    ) -> None:
        first = index * layout.num_sources
        label = f"{name} at reader {index}"
        self.lanes = all_or_none(
            StagedLaneReader(home, board, lanes_offset, layout, first + source, chunks, bell, label)
            for source, home in enumerate(homes)
        )
        arrivals = [lane.arrivals for lane in self.lanes]
        super().__init__(name, board, offset, ring, index, heap_memory, bell, arrivals=arrivals, copies=copies)
        self._num_wanted = 0  # asked for, and the message is not taken yet

    def _ask(self) -> None:
        self._num_wanted += 1

    def _take_asked(self) -> None:
        while self._num_wanted and self.take_record():
            self._num_wanted -= 1

    def _expect(self, notes: memoryview, message: memoryview) -> dict[int, Arriving]:
        sizes_bytes = [_NOTE.unpack_from(notes, source * _NOTE.size)[0] for source in range(len(self.lanes))]
        number = self._num_values  # of the execution: it may be asked for ahead of that
        return {
            source: self.lanes[source].expect(size_bytes, number)
            for source, size_bytes in enumerate(sizes_bytes)
            if size_bytes
        }

    def _check(self, source: int, part: Arriving) -> None:
        self.lanes[source].check(part)

    def serve(self) -> bool:
        """Goes on with values under way; in the loop, after the doorbell rang. Whether it should soon be called again."""
        if not self._is_closed:
            self._take_asked()
        return any([lane.serve() for lane in self.lanes])

    @property
    def recorded(self) -> Sequence[Recorded]:
        """What enqueues its copies, by lane."""
        return [lane.receiver for lane in self.lanes]

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

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once no device brings anything here any more."""
        return all([lane.settle() for lane in self.lanes])

    def give_back(self) -> None:
        """See `ApartReader`."""
        for lane in self.lanes:
            lane.give_back()

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        ring = super().statistics()
        return ChannelStatistics(
            ring.num_values,
            ring.num_bytes + sum(lane.num_bytes for lane in self.lanes),
            num_copied_out=ring.num_copied_out,
            num_kept=ring.num_kept,
        )
