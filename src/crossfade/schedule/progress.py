"""How far a simulation's strands and processes are."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from crossfade.schedule.cores import Work
from crossfade.schedule.strands import Need, Step, Strand
from crossfade.schedule.transfers import Transfer

__all__ = ["Cursor", "Process"]


@dataclass(slots=True, eq=False)
class Cursor:
    """Where one strand is."""

    strand: Strand
    round: int
    index: int = 0  # the step of the round it is at
    worked: bool = False  # whether the step's work is done, so that its ``then`` counts, no longer its ``needs``
    need: int = 0  # the first need that is not known to be met
    since_us: float = 0.0  # since when it is there
    waits_for: str = ""  # the last need that blocked it here
    patient_since_us: float = math.inf  # since when it looks at needs that it does not wait for without end

    @property
    def step(self) -> Step:
        """Where it is."""
        return self.strand.steps[self.index]

    @property
    def execution(self) -> int:
        """For which the step is done."""
        return self.round + self.step.ahead

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the step waits for now."""
        return self.step.then if self.worked else self.step.needs

    def settle(self, now_us: float, *, worked: bool) -> None:
        """Starts to look at the needs before, or after, the step's work."""
        self.worked, self.need, self.waits_for, self.since_us = worked, 0, "", now_us
        self.patient_since_us = math.inf


@dataclass(slots=True)
class Process:
    """What one actor's process does at the moment: its thread's work, and transfers in the background.

    ``awake_us`` is when its thread was last known to be awake, and ``woken_us`` when it was last woken: what arrived before that
    is seen then.
    """

    awake_us: float = 0.0
    woken_us: float = 0.0
    at_work: Cursor | None = None
    lining_up: deque[Cursor] = field(default_factory=deque)
    compute: Work | None = None
    transfers: list[Transfer] = field(default_factory=list)
