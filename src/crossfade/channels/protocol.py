"""The seam between the runtime and the transports.

A channel has one writer and one or more readers, each in its own process. Invariants (every transport passes
``testing.conformance``):

- **CH-1** a value that ``try_write`` accepted is read exactly once by every reader, in order, whole.
- **CH-2** closed by this side (`ChannelClosed`), closed or broken by the other (`ChannelBroken`), and full or empty past
  a time limit (`ChannelTimeout`, raised where one waits) are three different errors.
- **CH-3** when the other side dies, blocked and later calls raise; values that had arrived can still be read.

What a transport may not do: block in a ``try_`` method, wait for another channel, or keep a lock that the other side needs.
A value must not be changed once it was given to a channel: a transport may still be reading it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol


class Empty:
    """The type of `EMPTY`."""

    def __repr__(self) -> str:
        return "EMPTY"


EMPTY: Final = Empty()
"""What ``try_read`` returns when no value has arrived; also marks a missing value elsewhere."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counters of one end of a channel.

    Attributes:
        num_values: values written or read.
        num_bytes: bytes of those that were too large for a slot's record.
        num_copied_out: values that were copied because kept views held their share of the slots.
        num_slots: large slots that exist.
        slot_bytes: memory of all large slots together.
        num_kept: large slots that views keep at this moment.
    """

    num_values: int = 0
    num_bytes: int = 0
    num_copied_out: int = 0
    num_slots: int = 0
    slot_bytes: int = 0
    num_kept: int = 0


class Writer(Protocol):
    """The writing end.

    Attributes:
        on_moved: called with (start, end) in nanoseconds of the monotonic clock after the transport moved a value in the
            background, in whichever thread did; None, the default, costs nothing. Transports without a background ignore it.
    """

    on_moved: Callable[[int, int], None] | None

    def try_write(self, value: object) -> bool:
        """Accepts the value, or returns False when the ring is full. A `Failure` is a value like any other.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
            Exception: whatever pickling the value raised; nothing was written then.
        """

    def has_room(self) -> bool:
        """Whether the ring has room for one more value; if not, the readers ring when it has. Only this side takes room away.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
        """

    def try_flush(self) -> bool:
        """Whether every accepted value has left this process's memory."""

    def break_off(self, reason: str) -> None:
        """The other side is gone: calls raise `ChannelBroken` with this reason from now on."""

    def close(self) -> None:
        """Closes this end. Idempotent."""

    def statistics(self) -> ChannelStatistics:
        """Counters."""


class Reader(Protocol):
    """One reading end. ``on_moved``: see `Writer`."""

    on_moved: Callable[[int, int], None] | None

    def try_start(self) -> bool:
        """Lets the transport bring one more value in the background; False if no slot is free for it.

        Transports whose values come by themselves (shared memory) return True and do nothing.
        """

    def try_read(self) -> object:
        """The next value, or `EMPTY`. An error that the writer put there comes as a `Failure`, and so does a value that
        cannot be unpickled here.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
        """

    def is_idle(self) -> bool:
        """A cheap look: true as long as ``try_read`` would find nothing, unless the channel has ended."""

    def release(self) -> None:
        """The program has released the value that was read longest ago: its slot may be used again, unless the transport
        tracks the value's own lifetime (shared memory does).
        """

    def break_off(self, reason: str) -> None:
        """The other side is gone: once what had arrived is read, calls raise `ChannelBroken` with this reason."""

    def close(self) -> None:
        """Closes this end. Values that were read stay valid. Idempotent."""

    def statistics(self) -> ChannelStatistics:
        """Counters."""
