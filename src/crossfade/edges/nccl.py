"""The NCCL channel: a shared-memory ring for messages, and device tensors by NCCL's send and receive (``edges.nccl_link``).

The message goes ahead, so a reader knows what comes before it enqueues anything, whatever its shape. A value without device
tensors, and so a `Failure`, enqueues nothing on either side.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.values.device_codec import Split, places_of
from crossfade.device.home import DeviceHome
from crossfade.device.recorded import Begin, Recorded, Site
from crossfade.device.signals import Releasable
from crossfade.edges.apart import ApartReader, ApartWriter, Places
from crossfade.edges.arrivals import Arriving
from crossfade.edges.nccl_link import NcclLink
from crossfade.errors import ChannelBroken
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory

if TYPE_CHECKING:
    from crossfade.edges.host_copies import HostCopies

__all__ = ["NcclReader", "NcclWriter"]

_NOTE = struct.Struct("<Q")
"""Of each reader, of each of the writer's devices: the value's number in that lane of the link, counted from 1; 0 for none."""


class NcclWriter(ApartWriter):
    """The writing end.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        heap: the writer's heap.
        bells: the readers' doorbells, in the order of the readers.
        homes: the devices of this process, in their order.
        links: to each reader.
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
        homes: Sequence[DeviceHome],
        links: Sequence[NcclLink],
    ) -> None:
        note_bytes = len(links) * len(homes) * _NOTE.size
        super().__init__(name, board, offset, ring, heap, bells, homes=homes, note_bytes=note_bytes)
        self._links = links
        self._sites = [Site() for _ in homes]

    def _note(self, notes: bytearray, places: Places) -> None:
        for reader, link in enumerate(self._links):
            for source in places:
                at = (reader * len(self.homes) + source) * _NOTE.size
                _NOTE.pack_into(notes, at, link.lanes[source].number + 1)

    def _send(self, parts: Split, places: Places, ready: Sequence[int]) -> None:
        for source in places:
            tensors = [each.tensor for each in parts.tensors if each.lane == source and each.size_bytes]
            for link in self._links:
                link.lanes[source].send(tensors, ready[source], parts, self._sites[source].around)

    def try_flush(self) -> bool:
        """Always: an accepted value is enqueued."""
        return True

    def serve(self) -> bool:
        """Lets go of what was sent. Whether it should soon be called again."""
        for link in self._links:
            link.collect()
        return False

    @property
    def recorded(self) -> Sequence[Recorded]:
        """Its transfers, by device of this process."""
        return self._sites

    def signals(self, reader: int) -> list[Releasable]:
        """Nothing: aborting the link lets streams go."""
        return []

    def lose(self, reader: int, reason: str) -> None:
        """A reader is gone. The others get nothing more either."""
        self.give_up(reason)

    def settle(self) -> bool:
        """See `ApartWriter`."""
        return all([link.settle() for link in self._links]) and super().settle()


class NcclReader(ApartReader):
    """One reading end.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        index: which of the readers this is.
        heap_memory: the writer's heap.
        bell: the writer's doorbell.
        link: from the writer.
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
        link: NcclLink,
        copies: HostCopies | None = None,
    ) -> None:
        arrivals = [lane.arrivals for lane in link.lanes]
        super().__init__(name, board, offset, ring, index, heap_memory, bell, arrivals=arrivals, copies=copies)
        self._link = link
        self._sites = [Site() for _ in arrivals]
        self._given_up = ""
        self._has_left = False
        link.readers.append(self)

    def _ask(self) -> None:
        self._link.ask(self)

    def _take_asked(self) -> None:
        self._link.go_on()

    def _expect(self, notes: memoryview, message: memoryview) -> dict[int, Arriving]:
        places: dict[int, list[tuple[int, int]]] = {}
        for source, offset, size_bytes in places_of(message):
            if size_bytes:
                places.setdefault(source, []).append((offset, size_bytes))
        parts: dict[int, Arriving] = {}
        for source, each in places.items():
            at = (self.index * len(self.arrivals) + source) * _NOTE.size
            parts[source] = self._link.receive(source, _NOTE.unpack_from(notes, at)[0] - 1, each, self._begin(source))
        return parts

    def _begin(self, source: int) -> Begin | None:
        """Records a transfer of the value that is taken now, which may be asked for ahead of its execution."""
        around = self._sites[source].around
        return None if around is None else partial(around, execution=self._num_values)

    def _check(self, source: int, part: Arriving) -> None:
        reason = self._link.reason or self._given_up
        if reason:
            raise ChannelBroken(f"channel {self.name} is broken: {reason}")

    @property
    def is_writer_gone(self) -> bool:
        """Whether the writer has closed its end, so that nothing more comes."""
        return bool(self._state[self._gone])

    @property
    def recorded(self) -> Sequence[Recorded]:
        """Its transfers, by the writer's device."""
        return self._sites

    def serve(self) -> bool:
        """Takes messages that were asked for. Whether it should soon be called again."""
        if not self._is_closed:
            self._take_asked()
        return False

    def signals(self) -> list[Releasable]:
        """Nothing: aborting the link lets streams go."""
        return []

    def break_off(self, reason: str) -> None:
        """See the protocol."""
        super().break_off(reason)
        self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Somebody else is gone, and the writer is not: no tensor is given out any more."""
        self._given_up = self._given_up or reason

    def close(self) -> None:
        """See the protocol. The ring stays open until all that was sent has been received: go on with `settle`."""
        self._is_closed = True
        self.inbox.clear()

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once no device brings anything here any more."""
        if not self._link.settle():
            return False
        if not self._has_left:
            self._has_left = True
            self._is_closed = False
            super().close()
        return True
