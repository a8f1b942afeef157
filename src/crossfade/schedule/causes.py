"""What happened in a simulation because of what: the chain of causes that ends where the prediction ends.

Whatever is done has one *cause*: what was over last of all that it waited for, on its own thread or elsewhere. From the last end
the critical path leads back, cause by cause; its pieces fill the predicted time without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.plan.spans import WAIT

LINK = "link"
"""The kind of what is on its way between actors; what actors do themselves has the kinds of spans."""


@dataclass(slots=True, eq=False)
class Happening:
    """A step of an actor, a transfer or a collective, once it is over."""

    where: str  # the actor, or what moves it: a link, or a collective and its parties
    kind: str  # ``compute``, ``communicate`` or ``link``; empty for bookkeeping
    start_us: float
    end_us: float
    cause: Happening | None


class Trail:
    """What has happened in one simulation so far."""

    def __init__(self) -> None:
        self.now_over: Happening | None = None  # what has just ended, and makes others begin
        self.last: Happening | None = None  # what ended last
        self.moves: list[Happening] = []  # transfers and collectives
        self._last_on: dict[str, Happening] = {}

    def add(self, where: str, kind: str, start_us: float, end_us: float, cause: Happening | None) -> Happening:
        """Notes what has ended now, and why it began."""
        self.now_over = happening = Happening(where, kind, start_us, end_us, cause)
        if kind == LINK:
            self._last_on[where] = happening
            self.moves.append(happening)
        if self.last is None or end_us >= self.last.end_us:
            self.last = happening
        return happening

    def last_on(self, link: str) -> Happening | None:
        """The transfer that ended last on a link."""
        return self._last_on.get(link)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the critical path."""

    where: str
    kind: str  # as of a happening; ``wait`` from the end of the cause until this begins: seeing it, waking, waiting for the thread
    start_us: float
    end_us: float


def critical_path(last: Happening | None) -> list[Piece]:
    """From the beginning to the end of ``last``."""
    pieces: list[Piece] = []
    while last is not None:
        cause_us = last.cause.end_us if last.cause is not None else last.start_us
        begin_us = min(max(last.start_us, cause_us), last.end_us)
        if begin_us < last.end_us:
            pieces.append(Piece(last.where, last.kind, begin_us, last.end_us))
        if cause_us < begin_us:
            pieces.append(Piece(last.where, WAIT, cause_us, begin_us))
        last = last.cause
    return pieces[::-1]
