"""How long a list of operations on streams takes, and what that time consists of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Prediction", "Program"]

LAUNCHES = "launches"
"""The term for time in which the device waits for the host."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time and its terms, which add up to it.

    Attributes:
        total_us: all of it.
        terms: name and time of each part, those on the way from the first operation to the end of the last: what is hidden
            behind something else is not in it.
    """

    total_us: float
    terms: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        rows = [*self.terms, ("total", self.total_us)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {time_us:10.1f} us" for name, time_us in rows)


@dataclass(frozen=True, slots=True)
class _Done:
    """An operation in its place.

    Attributes:
        term: what its time counts as.
        start_us, end_us: when it runs.
        cause: the operation that it waited for last; None for the host, which enqueued it then.
    """

    term: str
    start_us: float
    end_us: float
    cause: int | None


class Program:
    """Operations in the order in which one host enqueues them. Each begins when it is enqueued, the one before it on its stream
    has ended, and so have those that it waits for.
    """

    def __init__(self) -> None:
        self._done: list[_Done] = []
        self._last_on: dict[str, int] = {}
        self._host_us = 0.0

    def add(
        self, term: str, stream: str, duration_us: float, *, launch_us: float = 0.0, after: Iterable[int] = ()
    ) -> int:
        """Enqueues one.

        Args:
            term: what its time counts as.
            stream: where.
            duration_us: how long it runs.
            launch_us: of the host's time.
            after: numbers of earlier operations that have to end first.

        Returns:
            Its number.
        """
        self._host_us += launch_us
        before = [*after, *([self._last_on[stream]] if stream in self._last_on else [])]
        cause = max(before, key=lambda number: self._done[number].end_us, default=None)
        start_us = self._host_us
        if cause is not None and self._done[cause].end_us >= start_us:
            start_us = self._done[cause].end_us
        else:
            cause = None
        self._last_on[stream] = len(self._done)
        self._done.append(_Done(term, start_us, start_us + duration_us, cause))
        return self._last_on[stream]

    def finish(self) -> Prediction:
        """The time until all have ended. Its terms come in the order in which they first occur on the way there."""
        terms: dict[str, float] = {}
        at = max(range(len(self._done)), key=lambda number: self._done[number].end_us, default=None)
        way: list[_Done] = []
        while at is not None:
            way.append(self._done[at])
            at = way[-1].cause
        if way and way[-1].start_us:
            terms[LAUNCHES] = way[-1].start_us
        for each in reversed(way):
            terms[each.term] = terms.get(each.term, 0.0) + each.end_us - each.start_us
        return Prediction(way[0].end_us if way else 0.0, tuple((name, us) for name, us in terms.items() if us))
