"""Memory of torch's into which values come from other devices, without holding up what the device computes.

It is allocated on the stream that fills it, so it can be filled at once: whatever used it before is behind on that stream, or was
noted by torch (`record_stream`). The compute stream waits for the filling by an event. So nothing counts views and nothing is
handed back: a tensor that is kept is torch's like any other, with the other tensors of its value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

from crossfade.channels.values.codec import undecodable
from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.device.context import DeviceContext
from crossfade.edges.host_copies import Joiner
from crossfade.errors import DeviceError, Failure

if TYPE_CHECKING:
    import torch

    from crossfade.channels.values.device_codec import Make


class Arriving:
    """One value's part that comes to one device: ``size_bytes`` of it, into ``buffer``."""

    __slots__ = ("buffer", "event", "refusal", "size_bytes")

    def __init__(self, size_bytes: int, buffer: torch.Tensor | None, refusal: str) -> None:
        self.size_bytes = size_bytes
        self.buffer = buffer  # None if there was no memory for it; ``refusal`` says why
        self.refusal = refusal
        self.event = 0  # once all that fills it is enqueued: an event behind that. 0 before.

    @property
    def address(self) -> int | None:
        return None if self.buffer is None else self.buffer.data_ptr()


class Coming:
    """A value whose message was taken, and whose parts are awaited, by the writer's device."""

    __slots__ = ("is_private", "message", "parts")

    def __init__(self, message: memoryview, is_private: bool, parts: dict[int, Arriving]) -> None:
        self.message = message
        self.is_private = is_private
        self.parts = parts

    @property
    def is_enqueued(self) -> bool:
        """Whether everything that brings the parts is enqueued."""
        return all(part.event for part in self.parts.values())


class Requests:
    """Values that programs have asked for, in order. Their messages are taken in this order as they come."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()

    def add(self, take: Callable[[], bool]) -> None:
        """One more; ``take`` takes its message, or returns False while it has not come."""
        self._waiting.append(take)
        self.take()

    def take(self) -> None:
        while self._waiting and self._waiting[0]():
            self._waiting.popleft()

    def clear(self) -> None:
        self._waiting.clear()


class Arrivals:
    """Makes such memory on one device for a stream that fills it, and gives it to the compute stream."""

    def __init__(self, home: DeviceContext, stream: int) -> None:
        self.stream = stream
        self.home = home
        self._driver = home.driver
        self._torch = torch_or_raise()
        self._device = device_of(home.device)
        self._events: list[int] = []
        self._spare: list[int] = []  # those that stand for nothing
        self._as_torch: Any = None
        if not home.is_host:
            self._as_torch = self._torch.cuda.ExternalStream(stream, device=home.device)

    def on_stream(self) -> AbstractContextManager[Any]:
        """While it is entered, torch works on the stream that fills."""
        return nullcontext() if self._as_torch is None else self._torch.cuda.stream(self._as_torch)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Memory that the stream may fill. Raises a RuntimeError if there is none."""
        with self.on_stream():
            return self._torch.empty(size_bytes, dtype=self._torch.uint8, device=self._device)  # type: ignore[no-any-return]

    def expect(self, size_bytes: int) -> Arriving:
        """Memory for what comes, or the reason why there is none."""
        try:
            return Arriving(size_bytes, self.allocate(size_bytes), "")
        except (RuntimeError, MemoryError, DeviceError) as error:
            return Arriving(size_bytes, None, str(error) or type(error).__name__)

    def filled(self, arriving: Arriving) -> None:
        if not self._spare:
            self._spare.append(self._driver.create_event())
            self._events += self._spare
        arriving.event = self._spare.pop()
        self._driver.record_event(arriving.event, self.stream)

    def use(self, arriving: Arriving) -> None:
        """Lets the compute stream wait for it, and use it."""
        if arriving.event:
            self._driver.wait_event(self.home.compute_stream(), arriving.event)
            self._spare.append(arriving.event)
            arriving.event = 0
        if self._as_torch is not None and arriving.buffer is not None:
            arriving.buffer.record_stream(self._torch.cuda.current_stream(self.home.device))

    def close(self) -> None:
        """Gives its events back. Idempotent."""
        self._spare.clear()
        while self._events:
            self._driver.destroy_event(self._events.pop())


def put_together(name: str, coming: Coming, arrivals: Sequence[Arrivals], joiner: Joiner) -> object:
    """The value of channel ``name`` whose parts are all enqueued, or a `Failure`. The compute stream waits for them."""
    for source, part in coming.parts.items():
        arrivals[source].use(part)
    refused = next((part for part in coming.parts.values() if part.buffer is None), None)
    if refused is not None:
        error = DeviceError(
            f"channel {name}: there is no memory for a value of {refused.size_bytes} bytes: {refused.refusal}",
            hint="keep fewer tensors on the receiver's device, or let fewer executions be under way",
        )
        return Failure.capture(error, actor="", node=f"receiving the value of {name}")
    buffers = {source: part.buffer for source, part in coming.parts.items() if part.buffer is not None}
    make = _tensors_in(buffers, [each.home.device for each in arrivals])
    try:
        return joiner.join(coming.message, coming.is_private, lambda _: make)
    except Exception as error:
        return undecodable(error, name)


def _tensors_in(buffers: Mapping[int, torch.Tensor], devices: Sequence[int]) -> Make:
    """Makes the tensors of a value in the memory into which it came; ``devices`` are those of all lanes."""
    module = torch_or_raise()

    def make(lane: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        empty = module.empty(0, dtype=dtype, device=device_of(devices[lane]))
        size_bytes = prod(shape) * dtype.itemsize
        if not size_bytes:
            return empty.view(shape)  # type: ignore[no-any-return]
        buffer = buffers.get(lane)
        if buffer is None or offset + size_bytes > buffer.numel() or offset % dtype.itemsize:
            raise ValueError(f"a tensor of {size_bytes} bytes at {offset} does not lie within its value")
        return empty.set_(buffer.untyped_storage(), offset // dtype.itemsize, shape)  # type: ignore[no-any-return]

    return make
