"""Carries tensors by NCCL's send and receive (``edges.nccl_link``).

The message goes ahead, so a reader knows what comes before it enqueues anything, whatever its shape. A value without device
tensors, and so a `Failure`, enqueues nothing on either side.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial

import torch

from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.tcp import TcpWriter
from crossfade.channels.values.device_codec import Split, notes_of, places_of
from crossfade.device.context import DeviceContext
from crossfade.device.recorded import Begin, Recorded, Site
from crossfade.edges.arrivals import Arriving, Coming, put_together
from crossfade.edges.carrier import Incoming, Outgoing
from crossfade.edges.host_copies import Joiner
from crossfade.edges.nccl_link import NcclLink
from crossfade.edges.sources import Sources, cannot_send
from crossfade.errors import ChannelBroken, DeviceError

_NOTE = struct.Struct("<Q")
"""Of each reader, of each of the writer's devices: the value's number in that lane of the link, counted from 1; 0 for none."""


class OutgoingNccl(Outgoing):
    """The writer's side. ``homes``: the devices of this process, in their order; ``links`` go to each reader."""

    def __init__(self, ring: ShmWriter | TcpWriter, homes: Sequence[DeviceContext], links: Sequence[NcclLink]) -> None:
        self.ring = ring
        self.sources = Sources(homes, len(links) * len(homes) * _NOTE.size)
        self.links = links
        self._sites = [Site() for _ in homes]

    def split(self, value: object) -> Split:
        return self.sources.split(value)

    def try_send(self, parts: Split) -> bool:
        tensors: dict[int, list[torch.Tensor]] = {}
        for each in parts.tensors:
            if each.size_bytes:
                tensors.setdefault(each.lane, []).append(each.tensor)
        for reader, link in enumerate(self.links):
            for source in tensors:
                at = (reader * len(self.sources.homes) + source) * _NOTE.size
                _NOTE.pack_into(parts.notes, at, link.lanes[source].number + 1)
        self.ring.stage(parts.message)
        self.ring.publish()
        try:
            for source, some in tensors.items():
                ready, around = self.sources.ready[source], self._sites[source].around
                for link in self.links:
                    link.lanes[source].send(some, ready, parts, around)
        except (DeviceError, RuntimeError) as error:
            raise cannot_send(self, error) from error
        return True

    @property
    def recorded(self) -> Sequence[Recorded]:
        return self._sites

    def progress(self) -> bool:
        for link in self.links:
            link.collect()
        return False

    def drain(self) -> bool:
        if not all([link.drain() for link in self.links]):
            return False
        self.sources.close()
        return True


class IncomingNccl(Incoming):
    """The reader's side. The ring stays open until all that was sent has been received."""

    leaves_late = True

    def __init__(self, name: str, index: int, link: NcclLink, joiner: Joiner) -> None:
        self._name = name
        self._index = index
        self.joiner = joiner
        self.brought = joiner.brought
        self.link = link
        self.requests = link.requests
        self._sites = [Site() for _ in link.lanes]
        self._refusal = ""

    def decode(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        notes = notes_of(message)
        if notes is None and self.joiner.copies is None:
            return self.joiner.join(message, is_private)
        parts: dict[int, Arriving] = {}
        if notes is not None:
            places: dict[int, list[tuple[int, int]]] = {}
            for source, offset, size_bytes in places_of(message):
                if size_bytes:
                    places.setdefault(source, []).append((offset, size_bytes))
            for source, each in places.items():
                at = (self._index * len(self.link.lanes) + source) * _NOTE.size
                number, begin = _NOTE.unpack_from(notes, at)[0] - 1, self._begin(source, ring.num_values)
                parts[source] = self.link.receive(source, number, each, begin)
        return Coming(message, is_private, parts)

    def _begin(self, source: int, execution: int) -> Begin | None:
        """Records a transfer of a value, which may be asked for ahead of its execution."""
        around = self._sites[source].around
        return None if around is None else partial(around, execution=execution)

    def is_here(self, coming: Coming) -> bool:
        if coming.parts and (reason := self.link.reason or self._refusal):
            raise ChannelBroken(f"channel {self._name} is broken: {reason}")
        return coming.is_enqueued

    def finish(self, coming: Coming) -> object:
        return put_together(self._name, coming, [lane.arrivals for lane in self.link.lanes], self.joiner)

    @property
    def recorded(self) -> Sequence[Recorded]:
        return self._sites

    def progress(self) -> bool:
        self.link.requests.take()
        return False

    def refuse(self, reason: str) -> None:
        self._refusal = self._refusal or reason

    def drain(self) -> bool:
        return self.link.drain()
