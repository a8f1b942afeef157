"""Which way is the fastest: a few steps of each, and a choice that all ranks make alike. Pure.

A calibration has at most `MOST_STEPS` steps. The first step of each way warms it up: communicators and buffers are made in it, and
the ranks compare their collectives. One batch stays where no way wins by `LEAST_GAIN`.

Eager ways are timed one after the other, each in a row of its own steps, as it will run: a step behind one of another way takes
another time. (Two H200, a narrow prefill: one batch 35.5 ms in turns and 33.2 in a row, since its launches begin with an idle GPU;
by process groups 30.6 and 31.7, since ranks that begin together drift apart.) Captured ways, for which few steps are left, are
timed in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MOST_STEPS = 12
MOST_ROUNDS = 4
_NUM_UNTIMED = 2
"""Of a row: the step that warms up, and the one in which collectives that came before are captured, to be replayed later."""
LEAST_GAIN = 0.02


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
    is_timed: bool
    lines_up: bool  # it begins for all ranks at once


class _Timed(NamedTuple):
    taken_ms: float
    host_ms: float | None
    num_not_replayed: int


class Calibration:
    """The steps that are left, and what was measured.

    Args:
        ways: one batch first.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = list(ways)
        self._timed: dict[Way, list[_Timed]] = {way: [] for way in ways}
        self._trials = trials(ways)

    def next(self) -> Trial | None:
        """The next step; None when all are done."""
        return self._trials.pop(0) if self._trials else None

    def drop(self, way: Way) -> None:
        """A way does not work here: no more steps of it."""
        self._trials = [trial for trial in self._trials if trial.way != way]
        self.ways.remove(way)

    def note(self, way: Way, taken_ms: float, host_ms: float | None, num_not_replayed: int = 0) -> None:
        """A timed step: how long it took, and how long its launches took the CPU; None where the CPU does the work itself.
        ``num_not_replayed``: how many of its collectives will be replays of a captured graph later, and were not yet.
        """
        self._timed[way].append(_Timed(taken_ms, host_ms, num_not_replayed))

    def _counted(self, way: Way) -> list[_Timed]:
        """A way's steps; where some had at most half as many collectives that were not replayed as another one, only those."""
        timed = self._timed[way]
        most = max((step.num_not_replayed for step in timed), default=0)
        return [step for step in timed if 2 * step.num_not_replayed <= most] or timed

    @property
    def host_ms(self) -> dict[Way, list[float]]:
        """How long launches took, of the steps that count; nothing where the CPU does the work itself."""
        return {way: [step.host_ms for step in self._counted(way) if step.host_ms is not None] for way in self._timed}

    def medians_ms(self) -> list[float]:
        """What a step takes in a row of steps, one a way; infinite where nothing was measured.

        That is the GPU's time or that of the launches, whichever is longer: a few steps alone may run behind others that the GPU
        has still to do, and take it no longer than their kernels, however long their launches took.
        """
        host_ms = self.host_ms
        taken_ms = {way: [step.taken_ms for step in self._counted(way)] for way in self.ways}
        return [max(_median(taken_ms[way]), _median(host_ms[way] or [0.0])) for way in self.ways]


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else float("inf")


def trials(ways: Sequence[Way]) -> list[Trial]:
    """The steps of a calibration, at most `MOST_STEPS`.

    Captured ways begin with their capture, which is no step: the eager ones have warmed them up.
    """
    eager = [way for way in ways if not way.is_captured]
    captured = [way for way in ways if way.is_captured]
    if not captured:
        length = min(_NUM_UNTIMED + MOST_ROUNDS, MOST_STEPS // len(eager))
        return [Trial(way, k >= _NUM_UNTIMED, k == _NUM_UNTIMED - 1) for way in eager for k in range(length)]
    steps = [Trial(way, is_timed, is_timed) for is_timed in (False, True) for way in eager]
    rounds = min(MOST_ROUNDS, (MOST_STEPS - len(steps)) // len(captured))
    return steps + [Trial(way, is_timed=True, lines_up=True) for _ in range(rounds) for way in captured]


def choose(medians_ms: Mapping[Way, float]) -> Way:
    """The fastest way; one batch (the fastest of those) where no other way wins by `LEAST_GAIN`."""
    single = {way: taken for way, taken in medians_ms.items() if way.moves is Moves.ONE}
    best = min(medians_ms, key=lambda way: medians_ms[way])
    plain = min(single, key=lambda way: single[way])
    return best if medians_ms[best] * (1 + LEAST_GAIN) <= medians_ms[plain] else plain
