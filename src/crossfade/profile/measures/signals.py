"""How long a signal takes from a stream of one device to a stream of another: there and back many times, by streams alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from crossfade.profile.context import Context, Told
from crossfade.profile.steps import Step
from crossfade.profile.timing import Load, Part, measure_parts

__all__ = ["signals"]

NUM_TRIPS = 50


def signals(context: Context, step: Step) -> Generator[Any, Told, float]:
    """Microseconds one way."""
    (round_us,) = yield from measure_parts(context, [Load(_PingPong(context, step), NUM_TRIPS)])
    return round_us / NUM_TRIPS / 2


class _PingPong(Part):
    """One rank's half: all of it is enqueued before the gate opens, so no wait needs a host (PL-5)."""

    def __init__(self, context: Context, step: Step) -> None:
        first, second = step.ranks
        self._is_first = context.rank == first
        other = second if self._is_first else first
        self._tell = context.counter(context.rank, other)
        self._hear = context.counter(other, context.rank)
        self.timed: int = context.lane(0)

    def begin(self, size_bytes: int, num: int) -> Any:
        for count in range(self._hear.awaited + 1, self._hear.awaited + num + 1):
            if self._is_first:
                self._tell.set(self.timed, count)
                self._hear.wait(self.timed, count)
            else:
                self._hear.wait(self.timed, count)
                self._tell.set(self.timed, count)
