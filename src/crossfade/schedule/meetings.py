"""Collectives in the simulator: a rendezvous, then work for a core of each party, or for the GPUs of all."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from crossfade.plan.plan import CollectiveSpec, Plan
from crossfade.schedule.collective_costs import Estimate, estimate, is_on_gpus
from crossfade.schedule.cores import Cores
from crossfade.schedule.cost import BYTES_PER_US_AT_1_GBS, CostModel, ring_share
from crossfade.schedule.gpus import Exchange, GpuClock
from crossfade.schedule.network import Hosts
from crossfade.schedule.workload import Workload
from crossfade.types import Transport

_Began: TypeAlias = Callable[[CollectiveSpec, int], None]
_Met: TypeAlias = Callable[[CollectiveSpec, int, Mapping[str, float]], None]


class Meetings:
    """All collectives of one simulation.

    A collective starts when all its parties have started it, and the one before it of the same parties is over. By gloo it takes a
    core of each party for as long as the cost model says; between GPUs it takes these, and no core.

    ``began`` is called when one begins. ``met`` is called when a collective is over, with the execution and the time at which it
    began for each party: when its work began, or, between GPUs, when that party had come to it.
    """

    def __init__(
        self,
        plan: Plan,
        cores: Cores,
        gpus: GpuClock,
        workload: Workload,
        costs: CostModel,
        hosts: Hosts,
        began: _Began,
        met: _Met,
    ) -> None:
        self._plan, self._cores, self._gpus, self._hosts, self._began = plan, cores, gpus, hosts, began
        self._workload, self._costs, self._met = workload, costs, met
        self._came_us: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        self._num_started: Counter[tuple[str, int]] = Counter()
        self._num_working: dict[tuple[str, int], int] = {}
        self._lines: defaultdict[tuple[tuple[str, ...], Transport], deque[tuple[CollectiveSpec, int]]] = defaultdict(
            deque
        )
        self._estimates: dict[str, Estimate] = {}
        self.notes: list[str] = []  # what was not measured, and what stands for it
        for spec in plan.collectives:
            if spec.transport.moves_device_memory:
                self._prepare(spec)

    def _prepare(self, spec: CollectiveSpec) -> None:
        if is_on_gpus(self._plan, spec):
            gpus = [self._plan.devices[party][0] for party in spec.parties]
            found = self._estimates[spec.id] = estimate(self._costs, spec, gpus, self._sizes_bytes(spec))
            reason = found.reason
        else:
            reason = "not all of its actors have GPUs, and it is reckoned with as if by gloo"
        if reason:
            self.notes.append(f"{spec.kind} (collective {spec.id}): {reason}")

    def _sizes_bytes(self, spec: CollectiveSpec) -> list[int]:
        return list(map(self._workload.size_bytes, spec.inputs[spec.root]))

    def is_started_by_all(self, collective: CollectiveSpec, execution: int) -> bool:
        """One more host has started a collective of GPUs, in which its stream will take part. Whether it was the last one."""
        self._num_started[collective.id, execution] += 1
        return self._num_started[collective.id, execution] == len(collective.parties)

    def join(self, collective: CollectiveSpec, execution: int, party: str) -> None:
        """One more party has started it."""
        came_us = self._came_us[collective.id, execution]
        came_us[party] = self._cores.now_us
        if len(came_us) < len(collective.parties):
            return
        line = self._lines[collective.group, collective.transport]
        line.append((collective, execution))
        if len(line) == 1:
            self._begin(collective, execution)

    def _begin(self, collective: CollectiveSpec, execution: int) -> None:
        key, now_us = (collective.id, execution), self._cores.now_us
        self._began(collective, execution)
        done = partial(self._done, collective, execution)
        size_bytes = sum(self._sizes_bytes(collective))
        found = self._estimates.get(collective.id)
        if found is not None:
            self._num_working[key] = 1
            gpus = tuple(dict.fromkeys(self._plan.devices[party][0] for party in collective.parties))
            self._gpus.start(Exchange(collective.transport, gpus, size_bytes, found.time_us), now_us, done)
            return
        self._num_working[key] = len(collective.parties)
        self._came_us[key] = dict.fromkeys(collective.parties, now_us)
        work_us = self._costs.collective_time_us(collective.kind, len(collective.parties), size_bytes)
        work_us = max(work_us, self._network_us(collective, size_bytes))
        for party in collective.parties:
            self._cores.start(work_us, done, roams=True, host=self._hosts.index_of(party))

    def _network_us(self, collective: CollectiveSpec, size_bytes: int) -> float:
        """What the slowest hop of the ring takes for all that goes over it, where the ring leaves a host."""
        ring = zip(collective.parties, (*collective.parties[1:], collective.parties[0]), strict=True)
        hops = [pair for pair in ring if self._hosts.are_apart(*pair)]
        if not hops:
            return 0.0
        num = len(collective.parties)
        slowest_gbs = min(self._hosts.gbs(*pair) for pair in hops)
        fixed_us = self._costs.collective_us + max(self._hosts.latency_us(*pair) for pair in hops) * (num - 1)
        return fixed_us + ring_share(collective.kind, num) * size_bytes / (slowest_gbs * BYTES_PER_US_AT_1_GBS)

    def _done(self, collective: CollectiveSpec, execution: int) -> None:
        key = collective.id, execution
        self._num_working[key] -= 1
        if self._num_working[key]:
            return
        del self._num_working[key]
        line = self._lines[collective.group, collective.transport]
        line.popleft()
        self._met(collective, execution, self._came_us.pop(key))
        if line:
            self._begin(*line[0])
