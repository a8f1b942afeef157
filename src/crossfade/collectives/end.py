"""One party's end of a collective of device tensors, and what its group is given: tasks to do, and a mover to do them with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from crossfade.channels.protocol import ChannelStatistics
from crossfade.collectives.terms import Meeting, Offer
from crossfade.device.recorded import Around
from crossfade.errors import ChannelBroken, ChannelClosed

if TYPE_CHECKING:
    from crossfade.collectives.group import DeviceGroup

__all__ = ["DeviceCollective", "Mover", "Task"]


class Mover(Protocol):
    """Moves the tensors of collectives in which all parties are known to take part."""

    def move(self, meeting: Meeting, rank: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Enqueues on torch's current stream. ``tensors`` lie in one piece each; who receives a broadcast has none."""

    def let_go(self, why: str) -> None:
        """Nobody can be waited for any more: streams here that do are released."""

    def close(self) -> None:
        """All parties have done with it."""


@dataclass(slots=True, eq=False)
class Task:
    """One collective that was started.

    Attributes:
        end: whose.
        offer: what this party brings.
        number: of its record in the table.
        outs: what comes out, if it is known already.
        compute: the stream on which the program computes.
        done: the event behind the exchange; 0 before it is enqueued.
        is_taken: the program has what came out.
    """

    end: DeviceCollective
    offer: Offer
    number: int
    outs: list[torch.Tensor] | None
    compute: int
    done: int = 0
    is_taken: bool = False


class DeviceCollective:
    """One party's end of one collective; made by `DeviceGroup.collective`.

    Attributes:
        ready: the event behind which this party's tensors are there.
        expected: what was broadcast last: dtype and shape.
        broken: why it cannot be used any more; empty if it can.
        around: who records what it does on the device (see `crossfade.device.recorded.Recorded`).
        leaving: the stream that waits for what comes out, where it is not the compute stream.
    """

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, group: DeviceGroup, meeting: Meeting, number: int, rank: int, num_outputs: int) -> None:
        self.meeting = meeting
        self.number = number
        self.rank = rank
        self.num_outputs = num_outputs
        self.ready = group.home.driver.create_event()
        self.expected: tuple[torch.dtype, tuple[int, ...]] | None = None
        self.broken = ""
        self.around: Around | None = None
        self.leaving: int | None = None
        self._group = group
        self._result: tuple[Task | None, Sequence[object]] | None = None
        self._num_values = 0
        self._num_bytes = 0
        self._is_closed = False

    def start(self, values: Sequence[object]) -> None:
        """See the protocol."""
        self.raise_if_ended()
        self._group.start(self, values)

    def give(self, task: Task | None, result: Sequence[object]) -> None:
        """What comes out, with what it came from if that is a device's work."""
        self._result = (task, result)

    def begin(self, stream: int) -> Callable[[int], None] | None:
        """Before its part is enqueued: begins a span, and gives what ends it, with the bytes that each party brings; None where
        nobody records. Each execution has one of these ends, so its number is that of those which were done.
        """
        return None if self.around is None else self.around(stream, self._num_values)

    def count(self, offer: Offer, start_ns: int) -> None:
        """One more was done. The host says how long that took it where the device does not."""
        self._num_values += 1
        self._num_bytes += sum(tensor.nbytes for tensor in offer.tensors)
        if self.on_moved is not None and self.around is None:
            self.on_moved(start_ns, time.monotonic_ns())

    def pass_on(self) -> Callable[[], AbstractContextManager[None]] | None:
        """See the protocol. Writes are enqueued as if another stream than the program's had computed what they take."""
        if self._group.home.is_host:
            return None
        self.leaving, current = self._group.way_out()
        return current

    def try_finish(self) -> Sequence[object] | None:
        """See the protocol. What comes out is ready on the compute stream (on another, if it is only passed on), and perhaps not
        yet computed.
        """
        if self._result is None and not self._group.home.is_host:
            self._group.pump()
        if self._result is None:
            self._group.look_for_faults()
            self.raise_if_ended()
            return None
        (task, result), self._result = self._result, None
        if task is not None:
            self._group.take(task)
        return result

    def is_idle(self) -> bool:
        """See the protocol."""
        return self._result is None and (self._group.home.is_host or not self._group.can_move())

    def raise_if_ended(self) -> None:
        """See CH-2."""
        if self._is_closed:
            raise ChannelClosed(f"{self.meeting.label} was closed by this side")
        if self.broken and self._result is None:
            raise ChannelBroken(f"{self.meeting.label} is broken: {self.broken}")

    def break_off(self, reason: str) -> None:
        """See the protocol."""
        self._group.break_off(reason)

    def close(self) -> None:
        """See the protocol. The thread belongs to the group, which tells the others."""
        self._is_closed = True

    def statistics(self) -> ChannelStatistics:
        """See the protocol."""
        return ChannelStatistics(self._num_values, self._num_bytes)
