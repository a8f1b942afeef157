"""Detects that the launches of a chosen way have become slower than one batch.

The speed of a host changes. (Two H200 in a virtual machine: one core of an idle machine launched 400 small kernels in 2.8 ms or
in 4.1, for a tenth of a second or for minutes. Interleaved experts took 14.3 ms in ten seconds of measuring, and 18.3 in most steps
after that; one batch, which waits for the GPU, took 15.4 in all of them.)

Each rank votes at the end of a window of steps, and reads the votes at the end of the next one: none waits for another one, nor for
its GPU.
"""

from __future__ import annotations

import math

from crossfade.batches.agreement import Agreement
from crossfade.batches.calibration import Launches, Way

WINDOW_MS = 500.0
LEAST_STEPS = 16


class Watch:
    """Adds up the launches of a chosen way on one rank. All ranks make their watches in one order, and begin equally many steps.

    A step whose output has gradients counts when its backward has ended, and not at all without one.

    Args:
        agreement: with the other ranks.
        limit_ms: what a step of one batch took.
        step_ms: what a step of the choice took. Both are alike on all ranks.
        number: how many watches this kind of call has had, with this one: each has windows twice as long as the one before, since
            to measure again costs steps.
    """

    def __init__(self, agreement: Agreement, limit_ms: float, step_ms: float, number: int) -> None:
        self._agreement = agreement
        self._votes = agreement.votes()
        self._limit_ms = limit_ms
        self.window = max(LEAST_STEPS, math.ceil(WINDOW_MS / step_ms)) << (number - 1)
        self._num_steps = 0
        self._launches = Launches()

    def note_launches(self, way: Way, host_ms: float, num_not_replayed: int = 0) -> None:
        """A step's. As of `Calibration`; the way is the choice."""
        self._launches.add(host_ms)

    def is_slow(self) -> bool:
        """Called when a step begins. Whether, on some rank, the launches of the window before the last took longer than one batch.

        The answer is the same on all ranks in the same step. False where the process group is destroyed, since nothing can be
        measured then.
        """
        self._num_steps += 1
        if self._num_steps % self.window or not self._agreement.has_group:
            return False
        taken_ms, self._launches = self._launches.mean_ms() or 0.0, Launches()
        return self._votes.vote(says_yes=taken_ms > self._limit_ms)
