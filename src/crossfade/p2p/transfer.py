"""One send or receive of a value, from its beginning to the point where only devices are left to wait for."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from crossfade.device.events import PooledEvent
from crossfade.device.signals import Counter
from crossfade.errors import ChannelError
from crossfade.p2p.cells import Cell, Place
from crossfade.p2p.letters import Announced, Window
from crossfade.p2p.memory import Side

if TYPE_CHECKING:
    import torch


_NUMBERS = count(1)
"""Of receives."""


class Arrival(NamedTuple):
    """An announced value, and which announcement it was."""

    number: int
    value: Announced


_OF_EACH_THREAD = 2
"""CUDA's handle of the default stream of whichever thread uses it."""


class Taken:
    """Lent values in the order in which another rank's device takes them: a stream that waits for one waits for those before it,
    and need not wait for each (2 us). While a value has not been taken, no later one has, so a stream that waits for that still
    waits, and its handle is no other's; but for the one handle that stands for a stream of each thread.
    """

    def __init__(self) -> None:
        self._num_turns = 0
        self._awaited: dict[int, int] = {}  # by stream, the last turn that it waits for

    def next_turn(self) -> int:
        """Of one more value."""
        self._num_turns += 1
        return self._num_turns

    def is_awaited(self, stream: int, turn: int) -> bool:
        """Whether a stream waits, for another value, until one has been taken that has not been yet."""
        return self._awaited.get(stream, 0) >= turn

    def note(self, stream: int, turn: int) -> None:
        """A stream waits for a value."""
        if stream != _OF_EACH_THREAD:
            self._awaited[stream] = turn


class Transfer:
    """What both have. ``is_enqueued`` becomes True when everything that the transfer needs of the other rank's host has been done,
    or ``error`` says why it never will be. ``stream``: torch's current one when it began.
    """

    verb: ClassVar[str] = ""

    def __init__(self, side: Side, tag: int, rank: int, tensor: torch.Tensor | None, stream: int) -> None:
        self.side = side
        self.tag = tag
        self.rank = rank  # the other one
        self.tensor = tensor  # contiguous; kept as long as anything may use its memory
        self.size_bytes: int = 0 if tensor is None else tensor.nbytes
        self.stream = stream
        self.is_enqueued = False
        self.error: Exception | None = None
        # The copy has been made when the event comes, on that stream, or when the counter has come to the value.
        self._event: PooledEvent | None = None
        self.copy_stream: int | None = None
        self._counter: Counter | None = None
        self._value = 0
        # Of a lent value: those that the other rank takes, and its place among them.
        self.taken: Taken | None = None
        self.turn = 0

    @property
    def address(self) -> int:
        """Where its tensor lies, until it has been copied."""
        assert self.tensor is not None, "it is released by the last copy"
        address: int = self.tensor.data_ptr()
        return address

    def finish(self) -> None:
        """It is done, or is in the order of the stream on which it began."""
        self.is_enqueued = True

    def finish_behind(self, stream: int) -> PooledEvent:
        """All is enqueued; the copy has been made when the stream is as far, which the event tells."""
        event = self._event = self.side.events.at(stream)
        self.copy_stream = stream
        self.is_enqueued = True
        return event

    def finish_at(self, counter: Counter, value: int, stream: int | None = None) -> None:
        """All is enqueued; the copy has been made when the counter comes to the value. ``stream``: this rank's, if it copies."""
        self._counter, self._value = counter, value
        self.copy_stream = stream
        self.is_enqueued = True

    def let_go(self) -> None:
        """The copy has been made, or never will be: nobody needs to ask any more, and what was asked ends with the communicator."""
        self.tensor = self._event = self._counter = None

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
        event, counter = self._event, self._counter
        if event is None and counter is None:
            if (
                self.tensor is not None and self.side.current_stream() != self.stream
            ):  # it is in the order of another stream
                self.side.events.at(self.stream).hold(self.side.current_stream())
            return
        stream = self.side.join()
        if event is not None:
            if stream != self.copy_stream:
                event.hold(stream)
        elif counter is not None and not counter.has(self._value):
            if self.taken is None:
                counter.wait(stream, self._value)
            elif not self.taken.is_awaited(stream, self.turn):
                counter.wait(stream, self._value)
                self.taken.note(stream, self.turn)

    def is_copied(self) -> bool:
        """Whether the copy has been made; a look that waits for nothing."""
        event, counter = self._event, self._counter
        if event is not None:
            return event.has_come()
        return counter is None or counter.has(self._value)

    def misfit(self, other_bytes: int, is_other_host: bool) -> ChannelError:
        """It met a transfer that it does not fit."""
        own, other = (("the host's memory" if is_host else "a GPU") for is_host in (self.side.is_host, is_other_host))
        where = f", the one in {own}, the other in {other}" if own != other else ""
        return ChannelError(
            f"{self} met a transfer of {other_bytes} bytes{where}: nothing was copied",
            hint="the k-th send and the k-th receive with one tag need tensors of one length, on the same kind of device",
        )

    def __str__(self) -> str:
        return f"{self.verb} rank {self.rank} with tag {self.tag} ({self.size_bytes} bytes)"


class Send(Transfer):
    """A value for one rank."""

    verb: ClassVar[str] = "a send to"

    def __init__(
        self,
        side: Side,
        tag: int,
        rank: int,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtype: int,
        stream: int,
    ) -> None:
        super().__init__(side, tag, rank, tensor, stream)
        self.shape = shape
        self.dtype = dtype
        self._ready: PooledEvent | None = None

    def ready(self) -> PooledEvent:
        """An event behind the value's computation: to be asked for when it begins, or never."""
        if self._ready is None:
            self._ready = self.side.events.at(self.stream)
        return self._ready


class OpenWindow:
    """A window of this rank that the other one may still use. ``send``, whose value is in it, and ``cell`` are kept until then;
    ``number``: of its announcement, 0 for none. A posted one with a cell is kept until its ``receive`` has copied from there.
    """

    def __init__(
        self, word: int, uses: int, number: int = 0, send: Send | None = None, cell: Cell | None = None
    ) -> None:
        self.word = word
        self.uses = uses
        self.number = number
        self.send = send
        self.cell = cell
        self.receive: Receive | None = None
        self.is_void = False  # the other rank does not use it

    @property
    def is_of_lent(self) -> bool:
        """Whether a value of this rank's was announced where it lies."""
        return self.send is not None and self.cell is None

    def letter(self, place: Place, *, is_lent: bool, is_prompt: bool = True, stream: int = 0) -> Window:
        """What the other rank is told of this window, which lies at a place."""
        return Window(place.exported.memory, place.offset, self.word, self.uses, is_lent, is_prompt, stream)


class Receive(Transfer):
    """A value from one rank."""

    verb: ClassVar[str] = "a receive from"

    def __init__(self, side: Side, tag: int, rank: int, tensor: torch.Tensor | None, stream: int) -> None:
        super().__init__(side, tag, rank, tensor, stream)
        self.cell: Cell | None = None  # where its value is to be pushed, until it is posted
        self.window: OpenWindow | None = None  # while it is posted
        self.arrival: Arrival | None = None  # what came for a receive without a tensor
        self.landing: Window | OpenWindow | None = None  # where its value lies, until it is copied from there
        self.number = next(_NUMBERS)  # in the order in which this process began them
        self.ahead: Counter | None = None  # what a stream waits for although the other rank has not begun its send
        self._free: PooledEvent | None = None

    @property
    def is_settled(self) -> bool:
        return self.is_enqueued or self.landing is not None or self.error is not None

    def fail(self, error: Exception) -> None:
        """Where a stream waits ahead, it is let go; what it copies then is not valid."""
        if self.ahead is None:
            super().fail(error)
        else:
            self.error = self.error or error
            self.ahead.release()

    def is_to_land(self) -> bool:
        """Whether its value waits where it lies. (Another thread may copy it at any time, so it is asked for anew each time.)"""
        return self.landing is not None

    def free(self) -> PooledEvent:
        """An event behind the last use of the tensor before: to be asked for when it begins, where it may be needed later on."""
        if self._free is None:
            self._free = self.side.events.at(self.stream)
        return self._free

    def is_free_known(self) -> bool:
        """Whether `free` was asked for."""
        return self._free is not None

    def take_into(self, side: Side, tensor: torch.Tensor, stream: int) -> None:
        """It is known by now what comes."""
        self.side, self.tensor, self.size_bytes, self.stream = side, tensor, tensor.nbytes, stream
        self.number = next(_NUMBERS)
