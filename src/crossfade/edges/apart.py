"""Ends of channels whose device tensors go apart from their message, with the help of both hosts.

The message goes through the ring in shared memory, ahead of the tensors or beside them. The writer publishes it, and then sends the
tensors in whatever way the channel has. The reader takes it when its program has asked for the value (`try_start`), has memory made
for the tensors, and puts the value together when everything that brings them is enqueued (PL-5): by then the compute stream waits
for them. A value without device tensors is what it is in shared memory.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from crossfade.channels.protocol import EMPTY
from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import ShmReader, ShmWriter
from crossfade.channels.values.codec import is_plain, undecodable
from crossfade.channels.values.device_codec import Make, Split, Splitter, join, notes_of
from crossfade.device.home import DeviceHome, source_of
from crossfade.device.recorded import Site
from crossfade.edges.arrivals import Arrivals, Arriving, tensors_in
from crossfade.errors import ChannelBroken, DeviceError, Failure
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory

if TYPE_CHECKING:
    import torch

    from crossfade.edges.host_copies import HostCopies

__all__ = ["ApartReader", "ApartWriter", "Places"]

Places: TypeAlias = dict[int, list[tuple[int, int, int]]]
"""Of each of the writer's devices, the tensors that hold anything: (offset in its part of the value, address, length)."""


class ApartWriter(ShmWriter):
    """The writing end: what is the same for all such channels.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        heap: the writer's heap.
        bells: the readers' doorbells, in the order of the readers.
        homes: the devices of this process, in their order.
        note_bytes: how much is noted of a value's tensors.
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
        note_bytes: int,
    ) -> None:
        super().__init__(name, board, offset, ring, heap, bells)
        self.homes = homes
        self._splitter = Splitter(source_of(homes), note_bytes)
        self._ready = [home.driver.create_event() for home in homes]
        self._pending: tuple[object, Split] | None = None  # a value that there was no room for yet, taken apart

    def abandon(self) -> None:
        """The device does nothing any more, so nothing is on its way: the readers hear of it."""
        self.end()

    def try_write(self, value: object) -> bool:
        """See the protocol. On a device, the tensors of the value may be computed only by what is enqueued now."""
        if type(value) is Failure or is_plain(value):
            return super().try_write(value)
        if self._pending is None or self._pending[0] is not value:
            self._pending = (value, self._split(value))
        parts = self._pending[1]
        try:
            if not self.has_room():
                return False
            places = _places(parts)
            if places:
                self._note(parts.notes, places)
            self.stage(parts.message)
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        self.publish()
        if places:
            self._try_send(parts, places)
        return True

    def _split(self, value: object) -> Split:
        parts = self._splitter.split(value)
        for source in parts.lane_bytes:
            home = self.homes[source]
            home.driver.record_event(self._ready[source], home.compute_stream())
        return parts

    def _try_send(self, parts: Split, places: Places) -> None:
        try:
            self._send(parts, places, self._ready)
        except (DeviceError, RuntimeError) as error:  # some readers may have got it, so none can go on
            self.give_up(f"a tensor could not be sent: {error}")
            raise ChannelBroken(f"channel {self.name} is broken: {error}") from error

    def _note(self, notes: bytearray, places: Places) -> None:
        """Writes into the message what the readers have to know of the tensors."""
        raise NotImplementedError

    def _send(self, parts: Split, places: Places, ready: Sequence[int]) -> None:
        """Begins to send the tensors; ``ready`` are events, of each device, that stand for their computation."""
        raise NotImplementedError

    def give_up(self, reason: str) -> None:
        """Somebody else is gone, and the readers are not: no value is written any more, and nothing is sent."""
        self.break_off(reason)

    def close(self) -> None:
        """See the protocol. The devices may be behind: go on with `settle`."""
        self._pending = None
        super().close()

    def settle(self) -> bool:
        """Goes on with closing, without waiting. True once nothing here is used any more, by this process or by a device."""
        for home, event in zip(self.homes, self._ready, strict=False):
            home.driver.destroy_event(event)
        self._ready = []
        return True

    def give_back(self) -> None:
        """Once settled, and once nobody looks at `signals` any more: gives back what is left."""


def _places(parts: Split) -> Places:
    places: Places = {}
    for each in parts.tensors:
        if each.size_bytes:
            places.setdefault(each.lane, []).append((each.offset, each.tensor.data_ptr(), each.size_bytes))
    return places


class _Coming:
    """A value whose message has come: its parts that are awaited, by the writer's device."""

    __slots__ = ("message", "parts", "private")

    def __init__(
        self, message: memoryview, private: Callable[[memoryview], object], parts: dict[int, Arriving]
    ) -> None:
        self.message = message
        self.private = private
        self.parts = parts

    @property
    def is_enqueued(self) -> bool:
        """Whether everything that brings it is enqueued."""
        return all(part.event for part in self.parts.values())


class ApartReader(ShmReader):
    """One reading end: what is the same for all such channels.

    Args:
        name: for errors.
        board, offset, ring: where the ring's block lies.
        index: which of the readers this is.
        heap_memory: the writer's heap.
        bell: the writer's doorbell.
        arrivals: for each of the writer's devices, the memory into which its tensors come.
        copies: brings tensors in the message, which lay on the CPU, to the device; None where they are wanted on the CPU.

    Attributes:
        brought: those copies, for who records them.
        index: which of the readers this is.
        arrivals: as given.
        inbox: values that were asked for and whose messages have come.
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
        arrivals: Sequence[Arrivals],
        copies: HostCopies | None,
    ) -> None:
        super().__init__(name, board, offset, ring, index, heap_memory, bell)
        self.brought = Site()
        self._copies = copies
        self.index = index
        self.arrivals = arrivals
        self._devices = {source: each.device for source, each in enumerate(arrivals)}
        self._num_held = 0  # started and not yet released
        self.inbox: deque[object] = deque()
        self.has_no_record: Callable[[], bool] = self.is_idle
        inbox, has_no_record = self.inbox, self.is_idle
        self.is_idle = lambda: not inbox and has_no_record()  # without `self`: an end that refers to itself dies late

    def try_start(self) -> bool:
        """See the protocol."""
        if self._is_closed or (self._state[self._gone] and self.has_no_record()):
            self._raise_if_ended()
        if self._num_held >= self.layout.depth:
            return False
        self._num_held += 1
        self._ask()
        self._take_asked()
        return True

    def release(self) -> None:
        """See the protocol."""
        self._num_held -= 1

    def _ask(self) -> None:
        """One more value is asked for."""
        raise NotImplementedError

    def _take_asked(self) -> None:
        """Takes the messages of values that were asked for, as far as they have come."""
        raise NotImplementedError

    def take_record(self) -> bool:
        """Takes the next message; False if there is none."""
        if self.has_no_record():
            return False
        value = super().try_read()
        if value is EMPTY:
            return False
        self.inbox.append(value)
        return True

    def try_read(self) -> object:
        """See the protocol."""
        if self._is_closed:
            self._raise_if_ended()
        self._take_asked()
        if not self.inbox:
            if self._state[self._gone] and self.has_no_record():
                self._raise_if_ended()
            return EMPTY
        value = self.inbox[0]
        if isinstance(value, _Coming):
            for source, part in value.parts.items():
                self._check(source, part)
            if not value.is_enqueued:
                return EMPTY
            value = self._put_together(value)
        self.inbox.popleft()
        return value

    def _decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        notes = notes_of(message)
        if notes is not None:
            return _Coming(message, private, self._expect(notes, message))
        if self._copies is not None:  # it may hold tensors, to be brought when the program takes it
            return _Coming(message, private, {})
        return join(message, _no_lanes, private=private, shared=memoryview.toreadonly)

    def _expect(self, notes: memoryview, message: memoryview) -> dict[int, Arriving]:
        """Has the parts of a value brought here, whose message has come."""
        raise NotImplementedError

    def _check(self, source: int, part: Arriving) -> None:
        """Raises why nobody may wait for a part any more, if that is so.

        Raises:
            ChannelBroken: the writer, or somebody else, is gone.
        """
        raise NotImplementedError

    def _put_together(self, coming: _Coming) -> object:
        """The value, whose tensors are there for whoever computes behind this."""
        for source, part in coming.parts.items():
            self.arrivals[source].use(part)
        refused = next((part for part in coming.parts.values() if part.buffer is None), None)
        if refused is not None:
            return self._no_memory(refused)
        buffers = {source: part.buffer for source, part in coming.parts.items() if part.buffer is not None}
        make = tensors_in(buffers, self._devices)
        try:
            return self._join(coming, make)
        except Exception as error:
            return undecodable(error, self.name)

    def _join(self, coming: _Coming, make: Make) -> object:
        if self._copies is None:
            return join(coming.message, lambda _: make, private=coming.private, shared=memoryview.toreadonly)
        from crossfade.edges.brought import Brought

        brought = Brought(self._copies, self.brought.around)
        try:
            return join(coming.message, lambda _: make, private=brought.place, shared=memoryview.toreadonly)
        finally:
            brought.end()

    def _no_memory(self, part: Arriving) -> Failure:
        error = DeviceError(
            f"channel {self.name}: there is no memory for a value of {part.size_bytes} bytes: {part.refusal}",
            hint="keep fewer tensors on the receiver's device, or let fewer executions be under way",
        )
        return Failure.capture(error, actor="", node=f"receiving the value of {self.name}")

    def close(self) -> None:
        """See the protocol. The devices may be behind: go on with `settle`."""
        super().close()
        self.inbox.clear()

    def give_back(self) -> None:
        """Once settled, and once nobody looks at `signals` any more: gives back what is left."""

    @property
    def is_empty(self) -> bool:
        """Once settled: whether all memory has been given back. (Tensors that came are torch's.)"""
        return True


def _no_lanes(notes: memoryview) -> Callable[..., torch.Tensor]:
    raise ValueError("a value has no lanes")
