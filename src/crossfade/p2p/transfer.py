"""One send or receive of a value, from its beginning to the point where only devices are left to wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from crossfade.device.events import PooledEvent
from crossfade.device.signals import Counter
from crossfade.p2p.letters import Announced
from crossfade.p2p.memory import Side
from crossfade.p2p.windows import OpenWindow

if TYPE_CHECKING:
    import torch


class Arrival(NamedTuple):
    """An announced value, and which announcement it was."""

    number: int
    value: Announced


class Transfer:
    """What both have. ``is_enqueued`` becomes True when everything that the transfer needs of the other rank's host has been done,
    or ``error`` says why it never will be.
    """

    verb = ""

    def __init__(self, side: Side, tag: int, rank: int, tensor: torch.Tensor | None) -> None:
        self.side = side
        self.tag = tag
        self.rank = rank  # the other one
        self.tensor = tensor  # contiguous; kept as long as anything may use its memory
        self.size_bytes = 0 if tensor is None else tensor.nbytes
        self.is_enqueued = False
        self.error: Exception | None = None
        self._event: PooledEvent | None = None
        self._counter: tuple[Counter, int] | None = None

    @property
    def address(self) -> int:
        """Where its tensor lies, until it has been copied."""
        assert self.tensor is not None, "it is released by the last copy"
        return self.tensor.data_ptr()

    def finish(self, *, event: PooledEvent | None = None, counter: tuple[Counter, int] | None = None) -> None:
        """All is enqueued. The copy has been made when the event, or the counter, comes; without either there is none."""
        self._event, self._counter = event, counter
        self.is_enqueued = True

    def fail(self, error: Exception) -> None:
        """It will not happen."""
        if not self.is_enqueued:
            self.error = self.error or error

    @property
    def is_settled(self) -> bool:
        """Whether the host has nothing left to wait for."""
        return self.is_enqueued or self.error is not None

    def join(self) -> None:
        """Lets the current stream wait for the copy."""
        side = self.side
        stream = side.current_stream()
        if stream not in side.awaiting:
            side.awaiting.append(stream)
        if self._event is not None:
            self._event.hold(stream)
        if self._counter is not None:
            counter, value = self._counter
            if not counter.has(value):
                counter.wait(stream, value)

    def is_copied(self) -> bool:
        """Whether the copy has been made; a look that waits for nothing."""
        if self._event is not None:
            return self._event.has_come()
        return self._counter is None or self._counter[0].is_at_least(self._counter[1])

    def __str__(self) -> str:
        return f"{self.verb} rank {self.rank} with tag {self.tag} ({self.size_bytes} bytes)"


class Send(Transfer):
    """A value for one rank. ``ready`` stands for its computation."""

    verb = "a send to"

    def __init__(
        self,
        side: Side,
        tag: int,
        rank: int,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtype: int,
        ready: PooledEvent,
    ) -> None:
        super().__init__(side, tag, rank, tensor)
        self.shape = shape
        self.dtype = dtype
        self.ready = ready


class Receive(Transfer):
    """A value from one rank. ``free`` stands for the last use of the tensor before; both are None until it is known what comes."""

    verb = "a receive from"

    def __init__(
        self,
        side: Side,
        tag: int,
        rank: int,
        tensor: torch.Tensor | None,
        free: PooledEvent | None,
    ) -> None:
        super().__init__(side, tag, rank, tensor)
        self.free = free
        self.window: OpenWindow | None = None  # while it is posted
        self.arrival: Arrival | None = None  # what came for a receive without a tensor

    def take_into(self, tensor: torch.Tensor, free: PooledEvent) -> None:
        """It is known by now what comes."""
        self.tensor, self.size_bytes, self.free = tensor, tensor.nbytes, free
