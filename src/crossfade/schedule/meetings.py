"""Collectives in the simulator: a rendezvous, then work for a core of each party."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial

from crossfade.plan.plan import CollectiveSpec
from crossfade.schedule.cores import Cores
from crossfade.schedule.cost import CostModel, Workload

__all__ = ["Meetings"]


class Meetings:
    """All collectives of one simulation.

    A collective starts when all its parties have started it, and the one before it of the same parties is over. It takes a core
    of each party for as long as the cost model says; it is over when all of that is done.

    Args:
        cores: where the work is done.
        workload: the sizes of tensors.
        costs: what the work takes.
        met: called when a collective is over, with the execution and the time at which its work began.
    """

    def __init__(
        self, cores: Cores, workload: Workload, costs: CostModel, met: Callable[[CollectiveSpec, int, float], None]
    ) -> None:
        self._cores, self._workload, self._costs, self._met = cores, workload, costs, met
        self._num_here: Counter[tuple[str, int]] = Counter()
        self._num_working: Counter[tuple[str, int]] = Counter()
        self._lines: defaultdict[tuple[str, ...], deque[tuple[CollectiveSpec, int]]] = defaultdict(deque)

    def join(self, collective: CollectiveSpec, execution: int) -> None:
        """One more party has started it."""
        self._num_here[collective.id, execution] += 1
        if self._num_here[collective.id, execution] < len(collective.parties):
            return
        del self._num_here[collective.id, execution]
        line = self._lines[collective.group]
        line.append((collective, execution))
        if len(line) == 1:
            self._begin(collective, execution)

    def _begin(self, collective: CollectiveSpec, execution: int) -> None:
        num_parties = len(collective.parties)
        size_bytes = sum(map(self._workload.size_bytes, collective.inputs[collective.root]))
        work_us = self._costs.collective_time_us(collective.kind, num_parties, size_bytes)
        self._num_working[collective.id, execution] = num_parties
        done = partial(self._done, collective, execution, self._cores.now_us)
        for _ in collective.parties:
            self._cores.start(work_us, done, roams=True)

    def _done(self, collective: CollectiveSpec, execution: int, start_us: float) -> None:
        self._num_working[collective.id, execution] -= 1
        if self._num_working[collective.id, execution]:
            return
        del self._num_working[collective.id, execution]
        line = self._lines[collective.group]
        line.popleft()
        self._met(collective, execution, start_us)
        if line:
            self._begin(*line[0])
