"""Carries tensors between a device and messages in memory of the host, where one end of a channel is no device.

Such a tensor's bytes lie in its message, as those of a CPU tensor do, so the other end is any end of a shared-memory ring.

- Out of a device (`OutgoingToHost`): the message in the slot has room for the tensor, and the copy engine fills it. Such a value is
  *pending* until that is done: its record lies on the board and its readers are not told. What is written behind a pending value
  is pending as well, so all come in order (CH-1). A value without device tensors is told at once when none is pending.
- Onto a device (`IncomingFromHost`): CPU tensors and arrays are views on their slot, as in a `ShmReader`, and the slot is pinned:
  ``tensor.to("cuda", non_blocking=True)`` is one copy by the engine. Tensors that are wanted on the device are copied there from
  the slot, which is free when that is done. A slot from which the device still reads counts as kept. When those and the kept ones
  are all that the reader may keep, the next value waits for the device instead of being copied out, which would take longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.ring_layout import RingBlock
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter, silent
from crossfade.channels.values.codec import decode
from crossfade.channels.values.device_codec import Placed, Split, split_for_host
from crossfade.channels.values.layout import Encoded
from crossfade.channels.values.tensors import Place, tensor_of
from crossfade.device.events import PooledEvent
from crossfade.device.recorded import Begin, Recorded, Site
from crossfade.edges.carrier import Incoming, Outgoing
from crossfade.edges.host_copies import CopiesIn, HostCopies
from crossfade.edges.pinned import PinnedReaderSlots, PinnedWriterSlots, has_come
from crossfade.edges.publisher import Done
from crossfade.edges.reader import DeviceReader
from crossfade.edges.sources import short_failure
from crossfade.edges.writer import DeviceWriter
from crossfade.errors import CrossfadeError, DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory
from crossfade.host.semaphore import FENCE_AFTER_POST, full_fence


class _Telling:
    """Notifies a ring's readers of values in their order, some of them later. Takes the place of `ShmWriter.posts`."""

    def __init__(self, ring: ShmWriter, copies: HostCopies) -> None:
        # What becomes of the record that is published next: (what it waits for, what is done then, what is kept until then); None
        # for a record that is whole.
        self.job: tuple[tuple[PooledEvent, ...], Done, Any] | None = None
        self._readers, ring.posts = ring.posts, [silent(self._published)]
        self._copies = copies
        self._fence = full_fence()
        self._num_taken = self._num_told = 0  # values that were pending

    def _published(self) -> None:
        if self._copies.publisher.jobs:
            self._copies.poll()
        job, self.job = self.job, None
        if job is None and self._num_taken == self._num_told:
            self._tell()
            return
        self._num_taken += 1
        events, done, keep = job or ((), None, None)
        self._copies.publisher.submit(events, partial(self._finish, done), keep=keep)

    def _finish(self, done: Done | None, error: DeviceError | None) -> None:
        """By any thread, one value after the other."""
        if done is not None:
            done(error)
        self._tell()
        self._num_told += 1

    def _tell(self) -> None:
        for post, flags, ring in self._readers:
            post()
            if FENCE_AFTER_POST:
                self._fence()
            if flags[0]:
                ring()

    def is_flushed(self) -> bool:
        if self._num_taken != self._num_told:
            self._copies.publisher.poll()
        return self._num_taken == self._num_told


class OutgoingToHost(Outgoing):
    """The writer's side, in a process that has devices."""

    ring: ShmWriter

    def __init__(
        self,
        ring: ShmWriter,
        slots: PinnedWriterSlots,
        copies: HostCopies,
        *,
        actor: str = "",
        node: str = "",
        # Asked when the bytes of a value are there, before its readers are told, in any thread: why they cannot be trusted, if so.
        # (A stream that waited for the dead was released, and computed rubbish.) Must not block or raise.
        distrust: Callable[[], CrossfadeError | None] | None = None,
    ) -> None:
        self.ring = ring
        self._sites = [Site() for _ in copies.homes]
        self._slots = slots
        self._copies = copies
        self._where = (actor, f"{node or f'the value of channel {ring.name}'}, copying it from the GPU to the host,")
        self._distrust = distrust
        self._telling = _Telling(ring, copies)

    def split(self, value: object) -> Split:
        return split_for_host(value, self._copies.is_on_device)

    def try_send(self, parts: Split) -> bool:
        """Raises a `DeviceError` if no memory for it can be pinned, or the device refused. Nothing was written then."""
        message = parts.message
        assert isinstance(message, Encoded), "a message with tensors is no pickle alone"
        slot = self.ring.stage_in_slot(message)
        try:
            address = self._slots.address(slot)
        except DeviceError as error:
            self._slots.put_back(slot)
            raise DeviceError(
                f"channel {self.ring.name} has no memory for {message.size_bytes} bytes to which a GPU can copy: {error}",
                hint="let fewer executions be under way, or return less: memory of the host is pinned for each of them",
            ) from error
        try:
            events = self._copies.copy_out(address, parts.tensors, self._begins())
        except BaseException:
            self._abandon(slot, parts.tensors)
            raise
        self._telling.job = events, partial(self._finish, self.ring.at, slot), parts.tensors
        self.ring.publish()
        return True

    def _begins(self) -> dict[int, Begin]:
        """What records the copies, by device."""
        if self._sites[0].around is None:  # all are recorded, or none
            return {}
        return {
            home.device: site.around
            for home, site in zip(self._copies.homes, self._sites, strict=True)
            if site.around is not None
        }

    @property
    def recorded(self) -> Sequence[Recorded]:
        return self._sites

    def _abandon(self, slot: int, tensors: tuple[Placed, ...]) -> None:
        """Some of a value's copies are enqueued and others were refused: the slot is used again when those are done."""
        events = self._copies.ends_of_copies()
        self._copies.publisher.submit(events, lambda _: self._slots.unused.append(slot), keep=tensors)

    def _finish(self, at: int, slot: int, error: DeviceError | None) -> None:
        """The bytes of the record at ``at`` are there, or never will be; its readers are told next."""
        reason: CrossfadeError | None = error
        if reason is None and self._distrust is not None:
            reason = self._distrust()
        if reason is not None:
            self.ring.replace(at, short_failure(reason, *self._where))
            self._slots.unused.append(slot)

    def is_flushed(self) -> bool:
        return self._telling.is_flushed()

    def leave(self) -> None:
        """What is pending still comes; the memory goes back behind it."""
        if self._copies.is_pending:
            self._copies.publisher.submit((), lambda _: self.ring.leave())
        else:
            self.ring.leave()


class IncomingFromHost(Incoming):
    """The reader's side, in a process that has devices. The ring of the messages is not held. ``device`` says which tensors are
    brought to the device: "cuda" for all, "default" for those that lay on a device at the writer, "cpu" for none.
    """

    def __init__(self, ring: ShmReader, slots: PinnedReaderSlots, copies: HostCopies, device: str = "default") -> None:
        self.brought = Site()
        self._slots = slots
        self._copies = copies
        self._brings_all, self._brings_back = device == "cuda", device != "cpu"
        self._depth = ring.layout.depth
        self._has_no_record: Callable[[], bool] = ring.is_idle
        self._arriving: deque[tuple[PooledEvent, list[Any]]] = deque()  # ends of copies, and what they read from
        self._is_waiting = False  # for the device, to be told when it has read from a slot
        self._is_closed = False

    def may_take(self) -> bool:
        """False while the next value needs a slot's share which the device will give back by itself."""
        if not (self._arriving or self._slots.num_kept >= self._depth):
            return True
        self.collect()
        if self._is_closed or self._slots.num_kept < self._depth or self._has_no_record():
            return True
        events = (self._arriving[0][0],) if self._arriving else self._slots.next_end
        if not events:
            return True
        if not self._is_waiting:
            self._is_waiting = True
            self._copies.publisher.submit(events, self._stop_waiting)  # so that the loop, if asleep by then, is woken
        return False

    def collect(self) -> None:
        """Frees slots from which the device has read. The loop need not call it."""
        while self._arriving and has_come(self._arriving[0][0]):
            self._arriving.popleft()
        self._slots.collect()

    def _stop_waiting(self, error: DeviceError | None) -> None:
        self._is_waiting = False

    def decode(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        copies_in = CopiesIn(self._copies, self.brought.around)
        num_views = 0  # buffers of which the value holds views

        def place(data: memoryview) -> Place:
            def make(dtype: torch.dtype, shape: tuple[int, ...], was_on_device: bool) -> torch.Tensor:
                nonlocal num_views
                if self._brings_all or (was_on_device and self._brings_back):
                    return copies_in.bring(data, dtype, shape, is_pinned=slot is not None)
                num_views += 1
                return tensor_of(data if is_private else bytearray(data), dtype, shape)

            return make

        def share(data: memoryview) -> memoryview:
            nonlocal num_views
            num_views += 1
            return data.toreadonly()

        try:
            return decode(message, private=place, shared=share)
        finally:
            if copies_in.sources:
                self._arriving.append((copies_in.end(), copies_in.sources))
            if slot is not None and not num_views:
                self._slots.end_at_once(slot)

    def statistics(self, ring: ShmReader) -> ChannelStatistics:
        if not self._is_closed:
            self.collect()
        return ring.statistics()

    def leave(self) -> None:
        """What the device still reads from stays until it has."""
        self._is_closed = True
        while self._arriving:
            event, sources = self._arriving.popleft()
            self._copies.publisher.submit((event,), keep=sources)


def open_to_host(
    name: str,
    block: RingBlock,
    heap: Heap,
    bells: Sequence[Bell],
    copies: HostCopies,
    *,
    buffer_bytes: int = 0,
    actor: str = "",
    node: str = "",
    distrust: Callable[[], CrossfadeError | None] | None = None,
) -> DeviceWriter:
    """A writer of a ring in a process that has devices; its readers are any. (`ShmWriter`, `OutgoingToHost`: the arguments.) Raises
    a `DeviceError` if the slots that ``buffer_bytes`` asks for cannot be pinned.
    """
    slots = PinnedWriterSlots(heap, block, copies.pins, f"slots of {name}")
    ring = ShmWriter(name, block, heap, bells, buffer_bytes=buffer_bytes, slots=slots)
    return DeviceWriter(OutgoingToHost(ring, slots, copies, actor=actor, node=node, distrust=distrust), distrust)


def open_from_host(
    name: str,
    block: RingBlock,
    index: int,
    heap_memory: Memory,
    bell: Bell,
    copies: HostCopies,
    device: str = "default",
) -> DeviceReader:
    """A reader of a ring in a process that has devices; its writer is any. (`ShmReader`, `IncomingFromHost`: the arguments.)"""
    homes = [(home, copies.events(home)) for home in copies.homes]
    slots = PinnedReaderSlots(heap_memory, block, homes, copies.pins, f"slots of {name}")
    ring = ShmReader(name, block, index, heap_memory, bell, slots=slots)
    return DeviceReader(ring, IncomingFromHost(ring, slots, copies, device))
