"""What moves the values of a pair of ranks, and its letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from crossfade.device.signals import Counter
from crossfade.p2p.cells import Place
from crossfade.p2p.letters import Exported, Letter, Window
from crossfade.p2p.transfer import OpenWindow, Receive, Send, Transfer


@dataclass(frozen=True, slots=True)
class P2PStatistics:
    """Counters of one rank."""

    num_pushed: int  # values copied into a receive that waited
    num_pulled: int  # values copied out of the sender's memory, or received from another host
    num_lent: int  # values that were announced where they lie
    num_copied_first: int  # values that were copied into memory of the communicator, and announced there
    num_ahead: int  # receives that a stream waited for before their sends had begun
    num_bytes: int  # of all values pushed and pulled

    @classmethod
    def of(cls, carriers: Sequence[Carrier]) -> P2PStatistics:
        """Of all pairs together."""
        return cls(*(sum(getattr(each, field.name) for each in carriers) for field in fields(cls)))


class Letters(Protocol):
    """The letters to one other rank, and from it. One thread at a time uses them."""

    def have_come(self) -> bool:
        """Whether there is one to take, or the other rank cannot be reached any more."""

    def take(self) -> Letter | None:
        """The next letter; None if there is none."""

    def put(self, letter: Letter) -> None:
        """Sends it, now or with a later call of anything here."""

    def flush(self) -> bool:
        """Whether all letters are on their way."""

    def drop(self) -> None:
        """The other rank is gone."""


class Mark(Protocol):
    """Tells whether a rank of a pair is in the middle of a send (see `crossfade.p2p.board.SendMark`)."""

    def begin(self) -> None:
        """This rank is about to look, and then to send."""

    def end(self) -> None:
        """Its letter can be read."""

    def is_other_sending(self) -> bool:
        """Whether the other rank is, or may be."""


class Offer(NamedTuple):
    """A value that the other rank can have."""

    window: Window  # for the letter
    opened: OpenWindow | None  # None if nothing is kept of it here


class Carrier:
    """What moves the values of a pair: `crossfade.p2p.copies.Copies` through windows, `crossfade.p2p.far.FarCopies` without them.

    A method that enqueues raises a `DeviceError` if a driver refused.
    """

    def __init__(self) -> None:
        self.death: Exception | None = None  # of the other rank
        self.lost: Exception | None = None  # why a stream waited ahead for what did not come
        self.num_pushed = self.num_pulled = self.num_lent = self.num_copied_first = 0
        self.num_ahead = self.num_bytes = 0

    # Sending

    def push(self, send: Send, window: Window) -> None:
        """Copies a value into a posted window."""
        raise NotImplementedError

    def offer(self, send: Send, number: int, *, is_urgent: bool) -> Offer | None:
        """Makes a value reachable, or a copy of it; None if that has to wait, which what is urgent (requested) need not for long.
        ``number``: of its announcement.
        """
        raise NotImplementedError

    def announced(self, number: int) -> OpenWindow | None:
        """The window of an announcement, with its send, as long as it is open."""
        return None

    # Receiving

    def place_of(self, receive: Receive) -> Place | None:
        """Where a receive's tensor lies, if the other rank can write there, and a window on it can be opened."""
        return None

    def unplace(self, receive: Receive) -> None:
        """It is not posted, although it could be."""

    def post(self, receive: Receive, place: Place) -> Window:
        """Opens a window on the receive's tensor, which has this `place_of`."""
        raise NotImplementedError

    def expect(self, number: int, receive: Receive) -> None:
        """The value with that number is about to be requested."""

    def hold(self, receive: Receive) -> None:
        """A receive waits; it may be posted next."""

    def pull(self, receive: Receive, number: int, window: Window) -> None:
        """Copies a value out of an announced window, or takes the one that was requested. Where streams wait ahead, it may stay
        there until it has come, or until `land`.
        """
        raise NotImplementedError

    def accept(self, receive: Receive, number: int, window: Window) -> None:
        """`pull` of a value that was not requested. A short one stays where it lies, its receive's ``landing``, until `land`."""
        self.pull(receive, number, window)

    def land(self, receive: Receive) -> None:
        """Copies the value in a receive's ``landing`` on the current stream."""
        raise NotImplementedError

    def land_ahead(self, receive: Receive) -> None:
        """The same for a posted value that the other rank is certain to push, if it lands in a cell of this rank's."""
        raise NotImplementedError

    def land_beside(self, receive: Receive, *, may_wait: bool) -> None:
        """The same on a stream of ours, behind what the tensor was used for. It may be left undone while that is captured, and
        until the value has come, unless the stream ``may_wait``.
        """
        raise NotImplementedError

    def landings(self) -> list[Receive]:
        """The receives whose values are to be landed."""
        return []

    @property
    def has_landings(self) -> bool:
        """Whether there are any."""
        return False

    def landings_to_come(self) -> Sequence[Receive]:
        """Those that are to be landed as soon as they have come."""
        return ()

    @property
    def is_waited_for(self) -> bool:
        """Whether the other rank waits for any of these."""
        return False

    # Both

    def finish(self, transfer: Transfer, window: OpenWindow) -> None:
        """The other rank has enqueued the copy through a window of this one's."""
        raise NotImplementedError

    def on_exported(self, exported: Exported) -> None:
        """The other rank's windows lie in this memory, too."""

    def on_forgotten(self, memory: int) -> None:
        """The other rank has no windows in this memory any more."""

    def forget(self, memory: int) -> None:
        """Memory of this rank is not there any more."""

    def collect(self) -> None:
        """Releases what no device uses any more."""

    @property
    def are_under_way(self) -> bool:
        """Whether devices may still be copying, as of the last `collect`."""
        return False

    def suspect(self, death: Exception) -> None:
        """The other rank has died, and streams that wait for it are about to be released: what they copy then is not valid. Called
        in another thread, and waits for none: the program's may be waiting for the device.
        """
        self.death = death

    def failure(self) -> Exception | None:
        """Why the other rank cannot be reached, where nothing else tells."""
        return None

    def signals(self) -> list[Counter]:
        """What the other rank sets and streams here may wait for. Any thread may ask."""
        return []

    def close(self) -> None:
        """Gives everything back; nothing may be under way."""
