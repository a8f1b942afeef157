"""Everything that is timed is enqueued behind the gate, between two timers, and begins on all devices at the same time.

One *part* is a thing to time: transfers, or work. Every rank has the same list of parts; where a rank has nothing to do for one,
its part is `IDLE`, and takes no time there. How long a part took is what it took on the rank where it took longest.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from crossfade.profile.context import Context, Told

NUM_WARM, NUM_ROUNDS = 2, 7


class Part:
    """What is enqueued for one thing to time; nothing, if it is no subclass.

    Attributes:
        timed: the stream on which it begins and ends, and which the gate holds; None for no time.
    """

    timed: int | None = None

    def begin(self, size_bytes: int, num: int) -> Any:
        """Enqueues ``num`` times, as far as it goes without the others; gives what they must know."""

    def finish(self, told: Told) -> None:
        """Enqueues the rest. ``told`` has what each rank's part in this place gave."""

    def settle(self, told: Told) -> None:
        """All is done on every device."""

    def leftover(self) -> Any:
        """After `finish`: what the others must know before the next round."""


IDLE = Part()


@dataclass(frozen=True, slots=True)
class Load:
    """How much of a part there is to do."""

    part: Part
    num: int = 1  # how often; 0 leaves it out
    size_bytes: int = 0  # of each transfer


def measure_parts(context: Context, loads: Sequence[Load]) -> Generator[Any, Told, list[float]]:
    """Times parts side by side, after rounds that warm up. All ranks get the same medians, in us; 0 for what was left out."""
    rounds = []
    for number in range(NUM_WARM + NUM_ROUNDS):
        times_us = yield from _round(context, loads, is_held=number >= NUM_WARM)
        rounds.append(times_us)
    mine = [median(column) for column in zip(*rounds[NUM_WARM:], strict=True)]
    told = yield mine
    return [max(column) for column in zip(*told.values(), strict=True)]


def _round(context: Context, loads: Sequence[Load], *, is_held: bool) -> Generator[Any, Told, list[float]]:
    active = [load.part if load.num else IDLE for load in loads]
    streams = list(dict.fromkeys(part.timed for part in active if part.timed is not None))
    for stream in streams:
        context.hold(stream, 2 if is_held else 0)
    first = [_start_timer(context, part) for part in active]
    told = yield [part.begin(load.size_bytes, load.num) for part, load in zip(active, loads, strict=True)]
    for place, part in enumerate(active):
        part.finish(_of_place(told, place))
    last = [_start_timer(context, part) for part in active]
    told = yield [part.leftover() for part in active]  # opens the gate
    times_us = [_elapsed_us(context, begin, end) for begin, end in zip(first, last, strict=True)]
    for stream in streams:
        while not context.driver.is_idle(stream):
            context.bench.pause()
    yield None  # all devices are done
    for place, part in enumerate(active):
        part.settle(_of_place(told, place))
    return times_us


def _of_place(told: Told, place: int) -> Told:
    """What each rank's part in one place has told."""
    return {rank: each[place] for rank, each in told.items()}


def _elapsed_us(context: Context, begin: int | None, end: int | None) -> float:
    """Waits until the second timer has happened, and destroys both; 0 where there are none."""
    if begin is None or end is None:
        return 0.0
    driver = context.driver
    while not driver.has_happened(end):
        context.bench.pause()
    time_us = driver.elapsed_us(begin, end)
    driver.destroy_event(begin)
    driver.destroy_event(end)
    return time_us


def _start_timer(context: Context, part: Part) -> int | None:
    if part.timed is None:
        return None
    timer = context.driver.create_timer()
    context.driver.record_event(timer, part.timed)
    return timer
