"""The two seams of the room: a party's end of a collective, as the runtime uses it, and a mover, as a group uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from crossfade.channels.protocol import ChannelStatistics
    from crossfade.collectives.rendezvous import Rendezvous
    from crossfade.collectives.table import Part
    from crossfade.collectives.terms import Terms


class Collective(Protocol):
    """One party's end of a collective: what several parties do together, each with values of its own.

    A party has at most one round of a collective under way. The parties of a group start the group's collectives in one order.
    CH-2 and CH-3 hold as for channels (`crossfade.channels.protocol`).

    Attributes:
        on_moved: called with (start, end) in nanoseconds of the monotonic clock for each round whose tensors were moved in the
            background, in any thread; None, the default, costs nothing.
    """

    on_moved: Callable[[int, int], None] | None

    def start(self, values: Sequence[object]) -> None:
        """Takes part, in the background, with these values. A `Failure` among the values of any party, and values that do not
        fit together, become the result of all parties.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
        """

    def try_finish(self) -> Sequence[object] | None:
        """The results of this party, or None while a party is missing or tensors are under way.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
        """

    def pass_on(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Called once before the first start if results are only forwarded: the compute stream then does not wait for them.

        Returns:
            A function that gives a new context manager, for each forwarding write to be made in; None if none is needed.
        """

    def is_idle(self) -> bool:
        """A cheap look: true as long as ``try_finish`` would find nothing, unless the collective has ended."""

    def break_off(self, reason: str) -> None:
        """A party is gone: once finished results are taken, calls raise `ChannelBroken` with this reason."""

    def close(self) -> None:
        """Closes this end. Idempotent."""

    def statistics(self) -> ChannelStatistics:
        """Counters of this party's own values."""


class Caller(Enum):
    """Which thread may call a mover."""

    ANY = auto()
    """Each one: a call only enqueues on a stream."""
    GROUP = auto()
    """The group's own: a call blocks until the tensors are moved."""
    PROGRAM = auto()
    """The program's, when it asks for the result: a call blocks, and runs the user's code."""


class Mover(Protocol):
    """Moves the tensors of collectives whose parties have all agreed to take part.

    Attributes:
        caller: which thread may call `move`.
        signal_bytes: room in each party's part of the table for the mover's signals.
    """

    caller: Caller
    signal_bytes: int

    def describe(self) -> str:
        """Takes memory that other parties' movers use; returns a text by which they find it."""

    def connect(self, rendezvous: Rendezvous, parts: Sequence[Part], published: Sequence[tuple[int, str]]) -> None:
        """Opens the memory of the others, or connects to them. All parties do it, and wait for each other.

        Args:
            rendezvous: of the parties.
            parts: of the table, by rank.
            published: process id and description of each party, by rank.
        """

    def move(self, terms: Terms, rank: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Moves tensors, or enqueues that on torch's current stream.

        Args:
            terms: of the collective.
            rank: this party's in it.
            tensors: contiguous; none for a receiver of a broadcast.
            outs: contiguous memory for the results.
        """

    def abort(self, reason: str) -> None:
        """A party does not do its part: releases streams and threads that wait for it. Any thread may call it."""

    def close(self) -> None:
        """Gives everything back, once all parties are done or if this one could not connect. Idempotent."""
