"""Values between a device and the host: what the channels of one process share, and where the copies are enqueued.

- Out of a device, `crossfade.edges.by_host.OutgoingToHost`: the copy engine writes into the slot of a ring, on
  `Role.UP`, behind what computes the tensors; the readers are told when the bytes are there (`crossfade.edges.publisher`).
- Onto a device, `crossfade.edges.by_host.IncomingFromHost`: slots are pinned, and tensors that are wanted on the
  device are copied there on `Role.DOWN`.

No host waits. A tensor that is brought to the device lies in memory that torch allocated *for the stream* `DOWN`, so the copy
need not wait for earlier computation (which may still use what was freed on the compute stream), and runs beside it; the
compute stream waits for the copy. In return torch must know that the compute stream uses the tensor (``record_stream``), so
that its memory is given to the next copy only when that use is over.

Imported only where torch already is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from crossfade.channels.values.device_codec import Make, OpenLanes, Placed, join
from crossfade.channels.values.tensors import Place, tensor_of
from crossfade.device.borrowed import device_of
from crossfade.device.context import DeviceContext
from crossfade.device.events import EventPool, PooledEvent
from crossfade.device.recorded import Begin, Site
from crossfade.device.streams import Role
from crossfade.edges.pinned import Pins
from crossfade.edges.publisher import PUBLISH_US, Publisher
from crossfade.errors import DeviceError
from crossfade.host.doorbell import Bell


class HostCopies:
    """The copies between the devices of one process and the host, for all of its channels."""

    def __init__(self, homes: Sequence[DeviceContext], bell: Bell, spin_us: float = PUBLISH_US) -> None:
        self.homes = homes
        self.pins = Pins(homes)  # host memory that they reach
        self.publisher = Publisher(bell, spin_us, self._enter_thread)  # tells readers on the host
        self._home_of = {device_of(home.device): home for home in homes}
        self._events = {home.device: EventPool(home.driver) for home in homes}
        self._down: Any = None

    @property
    def home(self) -> DeviceContext:
        """The device to which tensors are brought."""
        return self.homes[0]

    def _enter_thread(self) -> None:
        for home in self.homes:
            home.driver.enter_thread()

    def events(self, home: DeviceContext) -> EventPool:
        return self._events[home.device]

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device in self._home_of

    # Out of a device

    def copy_out(self, address: int, tensors: Iterable[Placed], begins: Mapping[int, Begin]) -> tuple[PooledEvent, ...]:
        """Enqueues copies of tensors (with their places in the message), that torch's current streams compute, to a message that
        begins at an address. ``begins`` records them, by device. Gives the events at which they are done. Raises a `DeviceError`
        if something was refused; some copies may be enqueued (`ends_of_copies`).
        """
        groups: dict[torch.device, list[Placed]] = {}
        for placed in tensors:
            groups.setdefault(placed.tensor.device, []).append(placed)
        return tuple(
            [self._copy_group(self._home_of[device], address, group, begins) for device, group in groups.items()]
        )

    def _copy_group(
        self, home: DeviceContext, address: int, tensors: list[Placed], begins: Mapping[int, Begin]
    ) -> PooledEvent:
        events, up = self._events[home.device], home.up_stream
        events.at(home.compute_stream()).hold(up)
        end = begins[home.device](up) if begins else None
        for _, offset, tensor in tensors:
            home.driver.copy(address + offset, tensor.data_ptr(), tensor.nbytes, up)
        if end is not None:
            end(sum(placed.size_bytes for placed in tensors))
        return events.at(up, is_waited=True)

    def ends_of_copies(self) -> tuple[PooledEvent, ...]:
        """When all copies out that are enqueued until now, on any device, are done; one that refuses does nothing any more."""
        events = []
        for home in self.homes:
            with suppress(DeviceError):
                events.append(self._events[home.device].at(home.up_stream, is_waited=True))
        return tuple(events)

    # Onto a device

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor on the device, to be filled on `Role.DOWN` and then used on torch's current stream."""
        home = self.home
        with nullcontext() if home.is_host else torch.cuda.stream(self._torch_down()):
            tensor = torch.empty(shape, dtype=dtype, device=device_of(home.device))
        if not home.is_host:
            tensor.record_stream(torch.cuda.current_stream(home.device))
        return tensor

    def _torch_down(self) -> Any:
        if self._down is None:
            self._down = self.home.streams.as_torch(Role.DOWN)
        return self._down

    def pinned(self, data: memoryview) -> memoryview:
        """The bytes in memory from which a copy does not hold up the host."""
        if self.home.is_host:
            return data
        try:
            near = torch.empty(data.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:  # no memory that can be pinned: the copy is slower, and right
            return data
        near.copy_(tensor_of(data, torch.uint8, (data.nbytes,)))
        return memoryview(near.numpy())  # type: ignore[arg-type]

    # For the loop, and at the end

    @property
    def is_pending(self) -> bool:
        """Whether the loop has to `poll`."""
        return bool(self.publisher.jobs)

    def poll(self) -> bool:
        """Does what can be done now, without waiting; whether that was anything."""
        has_done = self.publisher.poll()
        self.pins.collect()
        return has_done

    def close(self, timeout_s: float = 0.0) -> bool:
        """Gives everything back, once all channels are closed and their copies are done; whether it is so. Call it again where
        it is not.

        Streams that wait for the dead have to be released before.
        """
        if not self.publisher.close(timeout_s):
            return False
        self.pins.close()
        for events in self._events.values():
            events.close()
        return True


class CopiesIn:
    """The copies onto the device that one value takes. ``begin`` records them."""

    __slots__ = ("_begin", "_copies", "_end", "_size_bytes", "sources")

    def __init__(self, copies: HostCopies, begin: Begin | None) -> None:
        self.sources: list[Any] = []  # what they read from, to be kept until the event that `end` gives
        self._copies = copies
        self._begin = begin
        self._end: Callable[[int], None] | None = None
        self._size_bytes = 0

    def bring(self, data: memoryview, dtype: torch.dtype, shape: tuple[int, ...], *, is_pinned: bool) -> torch.Tensor:
        """The tensor of these bytes, on the device. Bytes that are not pinned are copied to memory that is, and from there."""
        copies, home = self._copies, self._copies.home
        tensor = copies.empty(dtype, shape)
        if tensor.nbytes != data.nbytes:
            raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {data.nbytes} bytes")
        if data.nbytes:
            source = data if is_pinned else copies.pinned(data)
            if self._begin is not None and self._end is None:
                self._end = self._begin(home.down_stream)
            self._size_bytes += tensor.nbytes
            # Before the copy, so that what is enqueued is kept. The CPU's memory knows no streams: there the tensor is, too.
            self.sources.append((source, tensor) if home.is_host else source)
            address = ctypes.addressof(ctypes.c_char.from_buffer(source))
            home.driver.copy(tensor.data_ptr(), address, tensor.nbytes, home.down_stream)
        return tensor

    def end(self) -> PooledEvent:
        """Holds torch's current stream until all copies in are done; when that is."""
        if self._end is not None:
            self._end(self._size_bytes)
        home = self._copies.home
        event = self._copies.events(home).at(home.down_stream, is_waited=True)
        event.hold(home.compute_stream())
        return event


def _no_lanes(notes: memoryview) -> Make:
    raise ValueError("a value has no lanes")


class Joiner:
    """Puts the values of one reader together, of a message and the tensors that came apart from it. ``copies`` brings CPU tensors,
    which lie in the message, to the reader's device; None where they are wanted on the CPU.
    """

    def __init__(self, copies: HostCopies | None) -> None:
        self.copies = copies
        self.brought = Site()  # what ``copies`` enqueued, for its recorder

    def join(self, message: memoryview, is_private: bool, open_lanes: OpenLanes = _no_lanes) -> object:
        """The value of a message; the tensors apart are made by what ``open_lanes`` gives. Raises what unpickling raised, or a
        ValueError when the message is damaged.
        """
        if self.copies is None:
            return join(message, open_lanes, private=memoryview if is_private else bytearray)
        copies_in = CopiesIn(self.copies, self.brought.around)

        def place(data: memoryview) -> Place:
            return lambda dtype, shape, was_on_device: copies_in.bring(data, dtype, shape, is_pinned=False)

        try:
            return join(message, open_lanes, private=place)
        finally:
            if copies_in.sources:  # torch's current stream waits, and what they read from is kept until they are done
                self.copies.publisher.submit((copies_in.end(),), keep=copies_in.sources)
