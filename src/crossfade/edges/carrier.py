"""The seam between a channel whose tensors travel apart from their message, and what carries the tensors.

The message goes through a ring in shared memory (``channels.shm_ring``), which a channel *has*, or between hosts over a wire into
such a ring (``channels.tcp``); so a value without such tensors is what it is there. The tensors go by a *carrier*, one file each:
``by_copies``, ``by_staging``, ``by_nccl``, ``by_host``, ``by_communicator``. `DeviceWriter` and `DeviceReader` are the two
ends, whatever carries.

A carrier obeys PL-5: whatever waits on a stream for a tensor is enqueued after that which brings it. No method waits for a device.

Its end is drawn in ``edges.life``: `mute`, `refuse`, `drain`, `notify` and `release` are the actions of that table.

A carrier derives from `Outgoing` or `Incoming`, whose other methods do nothing, or what is right where there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.shm_reader import ReadRecord, ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.tcp import TcpWriter
from crossfade.channels.values.device_codec import Split
from crossfade.device.recorded import Recorded, Site
from crossfade.device.signals import Releasable

if TYPE_CHECKING:
    from crossfade.edges.arrivals import Coming, Requests


class Outgoing:
    """Carries the tensors of a writer's values to all its readers.

    ``ring`` is that of the messages.
    """

    ring: ShmWriter | TcpWriter  # most carriers need one in shared memory

    @property
    def recorded(self) -> Sequence[Recorded]:
        """What enqueues copies, in turn for each device of the process."""
        return ()

    @property
    def try_send_tensor(self) -> Callable[[object], bool | None] | None:
        """What writes a value that is one tensor quicker than `split` and `try_send`, if the carrier has that. It returns True if
        the value was accepted, False if there is no room, None if the value goes the common way.
        """
        return None

    def split(self, value: object) -> Split:
        """Takes a value apart. Its tensors may be computed only by what is enqueued now.

        Raises:
            Exception: what pickling raised.
        """
        raise NotImplementedError

    def try_send(self, parts: Split) -> bool:
        """Writes a value for which the ring has room: stages and publishes its message, and sends its tensors, in the order that
        PL-5 wants. False, and nothing is written, if there is no room for the tensors.

        Raises:
            ChannelBroken, DeviceError: it cannot be sent.
            Exception: there is no memory for the message; nothing was written then.
        """
        raise NotImplementedError

    def is_flushed(self) -> bool:
        """Whether every accepted value has left this process."""
        return True

    def progress(self) -> bool:
        """Handles control records and values under way. True if it should be called again soon."""
        return False

    def signals(self, reader: int) -> Sequence[Releasable]:
        """Signals that a reader sets and streams of this process may wait for. Any thread may ask."""
        return ()

    def mute(self, reader: int, reason: str) -> None:
        """A reader died: it is told nothing any more. Any thread may call it."""

    def refuse(self, reason: str) -> None:
        """A party is gone, and the ring raises: nothing is sent any more. The living readers hear how it ends. Any thread may
        call it.
        """

    def leave(self) -> None:
        """This side closes; ``ring.is_closed`` is set. Leaves the ring, now or behind what is under way."""
        self.ring.leave()

    def drain(self) -> bool:
        """After `leave`, without waiting: True once nothing here is used any more, by this process or by a device."""
        return True

    def notify(self) -> None:
        """The device refused to drain: the readers need not wait for this side."""
        self.ring.end()

    def release(self) -> None:
        """Once drained, and once nobody looks at `signals` any more: gives memory back."""


class Incoming:
    """Brings the tensors of values to one reader.

    Attributes:
        requests: of values that the program has asked for, if messages are taken only then; None if whenever they come.
        is_direct: whether `ShmReader.try_read` alone gives all values: none is held back, and none comes as `Coming`.
        leaves_late: whether the ring is left only after `drain`.
        brought: the copies onto the device of CPU tensors that lie in messages.
    """

    requests: Requests | None = None
    is_direct: bool = False
    leaves_late: bool = False
    brought: Site

    @property
    def recorded(self) -> Sequence[Recorded]:
        """What enqueues copies, for each of the writer's devices."""
        return ()

    def decode(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        """`crossfade.channels.shm_reader.Decode`. Gives the value, or a `Coming` if its tensors are awaited."""
        raise NotImplementedError

    @property
    def read_record(self) -> ReadRecord | None:
        """What makes values of records that only this carrier knows."""
        return None

    def forget(self) -> None:
        """The ring has ended: what was prepared for a value does not come."""

    def may_take(self) -> bool:
        """Whether a message may be taken now. Not asked if the carrier is direct."""
        return True

    def is_here(self, coming: Coming) -> bool:
        """Whether everything that brings the tensors is enqueued.

        Raises:
            ChannelBroken: they will not come.
        """
        return True

    def finish(self, coming: Coming) -> object:
        """The value of which `is_here` said True, or a `Failure`. The compute stream waits for its tensors."""
        raise NotImplementedError

    def progress(self) -> bool:
        """Handles control records and values under way. True if it should be called again soon."""
        return False

    def signals(self) -> Sequence[Releasable]:
        """Signals that the writer sets and streams of this process may wait for. Any thread may ask."""
        return ()

    def mute(self, reason: str) -> None:
        """The writer died: its side counts as closed. Any thread may call it."""
        self.refuse(reason)

    def refuse(self, reason: str) -> None:
        """A party is gone, and the writer may not be: no tensor is given out any more. Any thread may call it."""

    def leave(self) -> None:
        """This side closes."""

    def drain(self) -> bool:
        """After `leave`, without waiting: True once no value can come any more and the devices are done with those that came."""
        return True

    @property
    def is_referenced(self) -> bool:
        """Once drained: whether the program still has tensors whose memory is to go back."""
        return False

    def release(self) -> None:
        """Once drained, and once nobody looks at `signals` any more: gives memory back."""

    def statistics(self, ring: ShmReader) -> ChannelStatistics:
        """Counters of the channel."""
        return ring.statistics()
