"""Which way is the fastest: a few steps of each, and a choice that all ranks make alike. Pure.

A calibration begins with at most `MOST_STEPS` steps. The first step of each way warms it up: communicators and buffers are made in
it, and the ranks compare their collectives. One batch stays where no way wins by `LEAST_GAIN`; after the second comparison, which
is accurate to half a percent, by `LEAST_GAIN_AGAIN`.

Eager ways are timed one after the other, each in a row of its own steps, as it will run: a step behind one of another way takes
another time. (Two H200, a narrow prefill: one batch 35.5 ms in turns and 33.2 in a row, since its launches begin with an idle GPU;
by process groups 30.6 and 31.7, since ranks that begin together drift apart.) Captured ways, for which few steps are left, are
timed in turns.

A GPU that was idle runs at a higher clock for some seconds, and some ways need more power than others. So ways that are near the
fastest one are timed once more when they have taken turns for `WARM_MS`: in longer rows, since a clock takes a third of a second to
follow. (Two H200 at their power limit, a wide prefill: one batch took 61.1 ms at first, 62.9 four seconds later, and 63.4 from the
eighth second on; by process groups 59.2, 59.7 and 60.4; by copy engines 57.5, 59.8 and 59.4. Of four calibrations that timed them
again after three seconds, two took one batch for as fast as copy engines. In rows that were timed for 0.2 s, training took 62.82 ms
by process groups and 62.85 by copy engines; in seconds that followed one another 63.5 and 62.8.) Of short steps the first few say
little, since each begins with a launch behind an idle GPU. (Captured, one batch 0.73 ms and process groups 0.65; in a row 0.35 and
0.44.)

An eager interleaved way whose launches take most of its time is as fast as the host, which is faster at one moment than at
another. So such a way is compared once more too before it is taken, and the mean of all launches meanwhile counts. (Two H200 in a
virtual machine: process groups 5.7 ms in four steps, one batch 6.6; then, in blocks of 20 steps that followed one another, 5.9 to
10.3, half of them above 8.5.) Captured ways have few launches, and where one batch has many, two parts have twice as many.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

MOST_STEPS = 12
MOST_ROUNDS = 4
_NUM_UNTIMED = 2
"""Of a row: the step that warms up, and the one in which collectives that came before are captured, to be replayed later."""
LEAST_GAIN, LEAST_GAIN_AGAIN = 0.02, 0.01
"""By how much a way must win over one batch to be chosen: after the first steps, and after the second comparison."""
CLOSE, CLOSE_MS = 0.05, 0.25
"""Ways that take at most so much longer than the fastest one, the one or the other, are timed again."""
HOST_BOUND, CLOSE_ON_HOST = 0.7, 0.4
"""An eager interleaved way is bound by the host if its launches take this share of its time or more. It is timed again if the
fastest one is too, or if it takes at most so much longer: a virtual host is faster at one moment than at another.
"""
WARM_MS = 8_000.0
_NUM_ROUNDS = 2
_ROW_MS, _MOST_STEPS = 500.0, 20
"""How long a row takes while the GPU becomes warm. On a warm one, so long are its untimed steps, and so long its timed ones; there
are at most so many of each.
"""


class Moves(StrEnum):
    """How communication goes in a way."""

    ONE = "one batch"
    """Nothing is interleaved: the module as it is."""
    GROUPS = "process groups"
    """Interleaved, by communicators of each batch's own."""
    COPIES = "copy engines"
    """Interleaved, by `crossfade.peers`, without multiprocessors."""

    @classmethod
    def of(cls, name: str | None) -> Moves | None:
        """What a user asked for, if anything."""
        if name is not None and name not in list(cls):
            raise ValueError(f"there is no way '{name}'\nhint: one of {', '.join(cls)}, or None to measure")
        return None if name is None else cls(name)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a call."""

    moves: Moves
    is_captured: bool = False

    def __str__(self) -> str:
        return f"{self.moves}, captured" if self.is_captured else str(self.moves)


@dataclass(frozen=True, slots=True)
class Trial:
    """One step of a calibration."""

    way: Way
    is_timed: bool = False
    lines_up: bool = False  # it begins for all ranks at once
    begins_idle: bool = False  # the CPU waits for the GPU before it
    counts_launches: bool = False


class _Timed(NamedTuple):
    taken_ms: float
    host_ms: float | None
    num_not_replayed: int


class Launches:
    """How long the CPU took to launch steps of one way."""

    def __init__(self) -> None:
        self._number = 0
        self._total_ms = self._most_ms = 0.0

    def add(self, host_ms: float) -> None:
        """A step's."""
        self._number += 1
        self._total_ms += host_ms
        self._most_ms = max(self._most_ms, host_ms)

    def mean_ms(self) -> float | None:
        """What the host costs in the long run: without the slowest step, which may have met a pause of the program's.

        None of fewer than two steps.
        """
        return (self._total_ms - self._most_ms) / (self._number - 1) if self._number > 1 else None


@dataclass(slots=True)
class _Again:
    """What the second comparison has of one way."""

    taken_ms: list[float] = field(default_factory=list)
    launches: Launches = field(default_factory=Launches)


class Calibration:
    """The steps that are left, and what was measured.

    Args:
        ways: one batch first.
        is_again: its ways were measured before: there is no second comparison, and no step lines up the ranks by a collective.
    """

    def __init__(self, ways: Sequence[Way], *, is_again: bool = False) -> None:
        self.ways = list(ways)
        self.is_again = is_again
        self._timed: dict[Way, list[_Timed]] = {way: [] for way in ways}
        self._trials = deque(replace(trial, lines_up=trial.lines_up and not is_again) for trial in trials(ways))
        self._again: dict[Way, _Again] = {}

    @property
    def least_gain(self) -> float:
        """By how much a way must win over one batch when the measured steps are over."""
        return LEAST_GAIN_AGAIN if self._again else LEAST_GAIN

    def next(self) -> Trial | None:
        """The next step; None when all are done."""
        return self._trials.popleft() if self._trials else None

    def drop(self, way: Way) -> None:
        """A way does not work here: no more steps of it."""
        self._trials = deque(trial for trial in self._trials if trial.way != way)
        self.ways.remove(way)

    def add_second_comparison(self, times_ms: Mapping[Way, float], launches_ms: Mapping[Way, float]) -> bool:
        """Adds steps that compare the fastest way, those that may be as fast and one batch on a warm GPU, and drops the other ways.

        Both mappings must be alike on all ranks. Returns whether it added any: it does so once, and only where it may change the
        choice.
        """
        best = choose(times_ms)
        step_ms = times_ms[best]
        bound = {
            way
            for way in self.ways
            if is_host_bound(way, times_ms[way], launches_ms[way]) and replace(way, is_captured=True) not in self.ways
        }

        def is_rival(way: Way) -> bool:
            share = CLOSE_ON_HOST if way in bound else CLOSE
            is_near = times_ms[way] <= step_ms + max(share * step_ms, CLOSE_MS)
            return way != best and (is_near or {way, best} <= bound)

        rivals = [way for way in self.ways if is_rival(way)]
        is_between_ways = any(way.moves is not Moves.ONE for way in (best, *rivals))
        if (
            self.is_again
            or self._again
            or not (rivals or best in bound)
            or not is_between_ways
            or not math.isfinite(step_ms)
        ):
            return False
        plain = min((way for way in self.ways if way.moves is Moves.ONE), key=lambda way: times_ms[way])
        self.ways = list(dict.fromkeys([best, *rivals, plain]))
        self._again = {way: _Again() for way in self.ways}
        length = math.ceil(_ROW_MS / step_ms)
        num_rounds = math.ceil(WARM_MS / (length * step_ms * len(self.ways)))
        num = min(length, _MOST_STEPS)
        last = max(num, _NUM_UNTIMED), max(num, MOST_ROUNDS)
        for number in range(num_rounds + _NUM_ROUNDS):
            for way in self.ways[:: -1 if number % 2 else 1]:
                row = _row(way, *(last if number >= num_rounds else (length, 0)), counts_launches=number > 0)
                self._trials.extend([replace(row[0], begins_idle=True), *row[1:]])
        return True

    def note(self, way: Way, taken_ms: float, host_ms: float | None, num_not_replayed: int = 0) -> None:
        """A timed step: how long it took, and how long its launches took the CPU; None where the CPU does the work itself.
        ``num_not_replayed``: how many of its collectives will be replays of a captured graph later, and were not yet.
        """
        if way in self._again:
            self._again[way].taken_ms.append(taken_ms)
        else:
            self._timed[way].append(_Timed(taken_ms, host_ms, num_not_replayed))

    def note_launches(self, way: Way, host_ms: float, num_not_replayed: int = 0) -> None:
        """A step of the second comparison, timed or not, whose launches count: how long they took the CPU."""
        if 2 * num_not_replayed <= self._most_not_replayed(way):
            self._again[way].launches.add(host_ms)

    def _most_not_replayed(self, way: Way) -> int:
        return max((step.num_not_replayed for step in self._timed[way]), default=0)

    def _counted(self, way: Way) -> list[_Timed]:
        """A way's steps; where some had at most half as many collectives that were not replayed as another one, only those."""
        timed, most = self._timed[way], self._most_not_replayed(way)
        return [step for step in timed if 2 * step.num_not_replayed <= most] or timed

    def launches_ms(self) -> list[float]:
        """How long the launches of a step take, one a way; 0 where the CPU does the work itself.

        That is a mean of the second comparison, and a median of the first steps.
        """
        return [self._launches_ms(way) for way in self.ways]

    def _launches_ms(self, way: Way) -> float:
        again = self._again.get(way)
        mean_ms = None if again is None else again.launches.mean_ms()
        if mean_ms is not None:
            return mean_ms
        return statistics.median([step.host_ms or 0.0 for step in self._counted(way)] or [0.0])

    def times_ms(self) -> list[float]:
        """What a step takes in a row of steps, one a way; infinite where nothing was measured.

        That is the GPU's time or that of the launches, whichever is longer: a few steps alone may run behind others that the GPU
        has still to do, and take it no longer than their kernels, however long their launches took.
        """
        return [max(self._gpu_ms(way), self._launches_ms(way)) for way in self.ways]

    def _gpu_ms(self, way: Way) -> float:
        """A median; of a second comparison that of the faster row, since a host that is slow for a moment makes the GPU wait."""
        again = self._again.get(way)
        if again is None or not again.taken_ms:
            return _median([step.taken_ms for step in self._counted(way)])
        length = math.ceil(len(again.taken_ms) / _NUM_ROUNDS)
        return min(_median(again.taken_ms[k : k + length]) for k in range(0, len(again.taken_ms), length))


def is_host_bound(way: Way, taken_ms: float, launches_ms: float) -> bool:
    """Whether launches take so much of an eager interleaved way's time that a slower host makes it slower."""
    return way.moves is not Moves.ONE and not way.is_captured and launches_ms >= HOST_BOUND * taken_ms


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else float("inf")


def _row(way: Way, num_untimed: int, num_timed: int, *, counts_launches: bool = False) -> list[Trial]:
    """Steps of one way, one after the other."""
    untimed = Trial(way, counts_launches=counts_launches)
    last, timed = replace(untimed, lines_up=True), replace(untimed, is_timed=True)
    return [*[untimed] * (num_untimed - 1), last if num_timed else untimed, *[timed] * num_timed]


def trials(ways: Sequence[Way]) -> list[Trial]:
    """The first steps of a calibration, at most `MOST_STEPS`.

    Captured ways begin with their capture, which is no step: the eager ones have warmed them up.
    """
    eager = [way for way in ways if not way.is_captured]
    captured = [way for way in ways if way.is_captured]
    if not captured:
        num_timed = min(MOST_ROUNDS, MOST_STEPS // len(eager) - _NUM_UNTIMED)
        return [trial for way in eager for trial in _row(way, _NUM_UNTIMED, num_timed)]
    steps = [Trial(way, is_timed, is_timed) for is_timed in (False, True) for way in eager]
    rounds = min(MOST_ROUNDS, (MOST_STEPS - len(steps)) // len(captured))
    return steps + [Trial(way, is_timed=True, lines_up=True) for _ in range(rounds) for way in captured]


def choose(times_ms: Mapping[Way, float], least_gain: float = LEAST_GAIN) -> Way:
    """The fastest way; one batch (the fastest of those) where no other way wins by ``least_gain``. An eager way has to win as much
    over a captured one, which a host that becomes slower does not make slower.
    """

    def fastest(ways: Collection[Way]) -> Way:
        step_ms = min(times_ms[way] for way in ways)
        captured = [way for way in ways if way.is_captured and times_ms[way] <= step_ms * (1 + least_gain)]
        return min(captured or ways, key=lambda way: times_ms[way])

    best, plain = fastest(times_ms), fastest([way for way in times_ms if way.moves is Moves.ONE])
    return best if times_ms[best] * (1 + least_gain) <= times_ms[plain] else plain
