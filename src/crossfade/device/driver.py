"""The seam between crossfade and a GPU: the few driver calls that this room makes.

A `Driver` speaks for one process and one device. Addresses, streams, events and graphs are plain integers. There are three
implementations, `crossfade.device.cuda.CudaDriver`, `crossfade.testing.fake.FakeDriver`, and, for processes that have no GPU,
`crossfade.device.host_driver.HostDriver`.

- Calls in the section *enqueue* put one operation at the end of a stream and return at once; a stream runs its operations in order.
- Calls in the section *look* ask how far the device is, and never block.
- `Driver.wait_host` blocks the calling thread, and is for threads that have nothing else to do.
- All others are for set-up. They may wait for the device, so they must not be made while a stream waits for a signal that this
  thread still has to bring about. (Measured: docs/decisions/0008.)

What a driver may not do: wait for another process, or enqueue an operation that the caller did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from crossfade.device.ledger import Ledger
from crossfade.errors import DeviceError
from crossfade.host.memory import Memory

HOST = -1
"""The device of a driver whose memory is the host's own."""


class OwnerGone(DeviceError):
    """Memory cannot be opened, since the process that made it is ending."""


class Allocation(NamedTuple):
    """Memory that was allocated in one piece, and that can be exported."""

    address: int  # where it begins
    size_bytes: int
    identity: int  # no other allocation of this process has, or had, the same


class HostRange(Protocol):
    """Shared host memory that the device can reach as well.

    Attributes:
        address: where the device sees it.
        size_bytes: its length.
    """

    address: int
    size_bytes: int

    def peek(self, offset: int) -> int:
        """The 32-bit word at ``offset``, as it is now."""

    def peeker(self, offset: int) -> Callable[[], int]:
        """`peek` of one word, for callers that do it often; not after `close`."""

    def poke(self, offset: int, value: int) -> None:
        """Stores a 32-bit word; no stream is involved, so this works however many streams wait."""

    def view(self) -> memoryview:
        """The bytes, for the host. A view may be used longer than the range; the device sees it no longer than that."""

    def close(self) -> None:
        """Takes it away from the device. Idempotent."""


class DeviceMemory(Protocol):
    """Memory that a device's copies reach, and that other processes open. For set-up, but for `allocation_of`.

    Attributes:
        device: the index of the device in this process whose tensors may lie in it, or `HOST`.
    """

    device: int

    def allocate(self, size_bytes: int, label: str) -> int:
        """Plain device memory that can be exported, aligned to 256 bytes at least."""

    def free(self, address: int) -> None:
        """Gives memory back; all operations on it must have finished."""

    def export(self, address: int) -> bytes:
        """A handle by which another process opens the allocation that starts at ``address``."""

    def open_handle(self, handle: bytes, label: str) -> int:
        """Opens another process's memory, in the context of *this* device."""

    def close_handle(self, address: int) -> None:
        """Ends the use of opened memory; this process's operations on it must have finished."""

    def allocation_of(self, address: int) -> Allocation | None:
        """Where the memory at an address begins and ends; None if it cannot be exported."""

    def identity_of(self, address: int) -> int:
        """The identity of the allocation that an address lies in, also if it cannot be exported; 0 if it is not this device's."""


class Driver(DeviceMemory, Protocol):
    """One process's words for one device.

    Attributes:
        device: the device's index in this process, or `HOST`.
        ledger: what was taken and not given back.
    """

    device: int
    ledger: Ledger

    # set-up

    def map_host(self, memory: Memory, offset: int, size_bytes: int, label: str) -> HostRange:
        """Maps shared host memory and pins it for the device."""

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        """A stream that does not synchronise with the default one."""

    def destroy_stream(self, stream: int) -> None:
        """Gives a stream back."""

    def create_event(self) -> int:
        """An event without timing."""

    def create_host_event(self) -> int:
        """An event that a thread can wait for without using a core (`wait_host`). CUDA records no more than 56 of them on a stream
        before the first one has come: the next record blocks the host until then (measured, driver 13.0).
        """

    def destroy_event(self, event: int) -> None:
        """Gives an event back."""

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        """Gives a range of memory a name for reports. Free of cost on a GPU."""

    # enqueue

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copies bytes between any two addresses that this process can reach."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Stores a 32-bit word after all that the stream did before; what it wrote is seen before the word is."""

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Holds the stream until the 32-bit word is at least ``value`` (as numbers that wrap around: less than 2^31 apart)."""

    def wait_and_reset(self, stream: int, address: int, value: int, reset: int) -> None:
        """`wait_value`, then `write_value` of ``reset`` to the same word, in one call."""

    def write_values(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """`write_value` to several words, in one call: a call, not a word, is what costs the stream time."""

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        """`wait_and_reset` of several words, in one call."""

    def record_event(self, event: int, stream: int) -> None:
        """The event stands for all that the stream was given until now."""

    def wait_event(self, stream: int, event: int) -> None:
        """Holds the stream until the event, as it was last recorded, has happened."""

    # look

    def is_idle(self, stream: int) -> bool:
        """Whether the stream has done all that it was given."""

    def has_happened(self, event: int) -> bool:
        """Whether the event, as it was last recorded, has happened."""

    def failure(self) -> str:
        """Why the device does nothing any more for this process; empty as long as it does. One thread asks, now and then."""

    # wait

    def wait_host(self, event: int) -> None:
        """Blocks the calling thread, and no other, until the event, as it was last recorded, has happened."""

    # capture

    def is_capturing(self, stream: int) -> bool:
        """Whether what is enqueued on the stream now is collected, and not run."""

    def enter_thread(self) -> None:
        """The first call of a thread that is crossfade's own: what it calls does not spoil what the program captures in another."""

    def begin_capture(self, stream: int) -> None:
        """What is enqueued on the stream from now on, and on streams that wait for its events, is collected and not run."""

    def end_capture(self, stream: int) -> int:
        """Ends the collection and gives a graph, ready to launch."""

    def launch(self, graph: int, stream: int) -> None:
        """Enqueues all of a graph's operations."""

    def destroy_graph(self, graph: int) -> None:
        """Gives a graph back."""


class TimedDriver(Driver, Protocol):
    """A driver that can say how long operations took: what calibration needs, and no hot path."""

    def create_timer(self) -> int:
        """An event that also notes the device's time; `destroy_event` gives it back."""

    def elapsed_us(self, first: int, last: int) -> float:
        """Device time between two timers that have happened."""
