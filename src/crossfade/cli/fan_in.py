"""The demo's program, and what is measured on it.

::

            Sender0.make  ─┐
    driver  Sender1.make  ─┼─►  Receiver.work (three times)  ─►  driver
            Sender2.make  ─┘

A *burst* is NUM_IN_BURST executions, of which at most MAX_INFLIGHT are under way, on a graph that is idle before and
after. The measured timeline is cut at the bursts' ends, so that the idle time between them is nobody's waiting; the
simulator predicts the same burst.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import crossfade
from crossfade.api import ActorHandle, CompiledGraph, remote
from crossfade.cli.actors import Receiver, Sender
from crossfade.cli.exits import WrongResult
from crossfade.cli.measure import in_flight_us, median
from crossfade.plan.device_streams import DeviceStream
from crossfade.plan.plan import Plan
from crossfade.plan.spans import WAIT, Overlap, Span
from crossfade.plan.timeline import Timeline
from crossfade.schedule.cost import CostModel
from crossfade.schedule.workload import Workload
from crossfade.topology import Topology, load_topology
from crossfade.types import DRIVER

NUM_WORDS = 500_000
NUM_PASSES = 20
NUM_IN_BURST = 6
MAX_INFLIGHT = 3
DEVICE_STREAMS = tuple(DeviceStream)
"""Names of spans' streams that are a GPU's."""
NUM_WARM = 2
"""Bursts that are not counted: slots are made, and their memory touched, when the first values need them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the program is made of."""

    # sender, receiver: classes of actors; a sender takes its number and then its arguments.
    sender: type
    receiver: type
    sender_args: tuple[Any, ...]
    receiver_args: tuple[Any, ...]
    num_senders: int
    num_gpus: int  # how many GPUs each actor has
    value_bytes: int  # size of what a sender makes
    # what the receiver makes of what sender n makes in an execution, computed here without any actor.
    expected: Callable[[int, int], int]
    overlap_transport: str  # of the edges on which the demo shows what overlap gains


def _expected(number: int, execution: int) -> int:
    return Receiver(NUM_WORDS, NUM_PASSES).work(Sender(number, NUM_WORDS).make(execution))


ON_CPU = Parts(Sender, Receiver, (NUM_WORDS,), (NUM_WORDS, NUM_PASSES), 3, 0, 4 * NUM_WORDS, _expected, "gloo")


class FanIn:
    """The actors, and the plain computation that all results are held against."""

    def __init__(self, parts: Parts = ON_CPU) -> None:
        self.parts = parts
        sender, receiver = (remote(num_gpus=parts.num_gpus)(cls) for cls in (parts.sender, parts.receiver))
        self.senders = [
            sender.options(name=f"Sender{n}").remote(n, *parts.sender_args) for n in range(parts.num_senders)
        ]
        self.receiver: ActorHandle = receiver.options(name="Receiver").remote(*parts.receiver_args)
        self._expected: dict[int, list[int]] = {}

    def compile(self, *, transport: str = "auto", overlap: bool = True) -> CompiledGraph:
        """The graph with that transport on the edges from the senders to the receiver; it records."""
        with crossfade.InputNode() as execution:
            arrays: list[Any] = [sender.make.bind(execution) for sender in self.senders]
            results: list[Any] = [self.receiver.work.bind(array.with_tensor_transport(transport)) for array in arrays]
            dag = crossfade.MultiOutputNode(results)
        graph: CompiledGraph = dag.compile(overlap=overlap, max_inflight=MAX_INFLIGHT, record=True)
        return graph

    def expected(self, execution: int) -> list[int]:
        """What an execution gives, computed here and now without any graph."""
        if execution not in self._expected:
            self._expected[execution] = [
                self.parts.expected(number, execution) for number in range(self.parts.num_senders)
            ]
        return self._expected[execution]

    def check(self, executions: Iterable[int], results: Iterable[list[int]]) -> None:
        """Compares results with the plain computation; raises a `WrongResult` if one differs."""
        for execution, result in zip(executions, results, strict=True):
            if result != self.expected(execution):
                raise WrongResult(f"the result of execution {execution}", result, self.expected(execution))


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst, on a clock that starts with it."""

    timeline: Timeline  # what ran, cut at the burst's start; executions count from 0
    results_us: tuple[float, ...]  # when each result was there

    @property
    def length_us(self) -> float:
        """Until the last result."""
        return self.results_us[-1]


@dataclass(frozen=True, slots=True)
class Shares:
    """What one party did with the time of all bursts, as shares of it."""

    # compute, wait: it ran a method; it was blocked on a value or a slot.
    compute: float
    # exposed, hidden: it communicated, and did not, or did, compute at the same time.
    exposed: float
    hidden: float
    wait: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The bursts of one graph."""

    parts: Parts
    plan: Plan
    bursts: tuple[Burst, ...]  # in order, without those that warmed up

    def execution_us(self) -> list[float]:
        """The times between successive results of a burst: what one more execution takes once things are rolling."""
        return [later - earlier for burst in self.bursts for earlier, later in pairwise(burst.results_us)]

    def typical(self) -> Burst:
        """The burst of median length."""
        return sorted(self.bursts, key=lambda burst: burst.length_us)[len(self.bursts) // 2]

    def durations_us(self, label: str, *, on_device: bool = False) -> list[float]:
        """How long an action took, each time, without waiting: its host, or what it enqueued on its device."""
        spans = [span for burst in self.bursts for span in burst.timeline.spans if span.label == label]
        return [
            span.duration_us for span in spans if span.kind != WAIT and (span.stream in DEVICE_STREAMS) == on_device
        ]

    def took_us(self, label: str) -> list[float]:
        """How long an action took where it did its work: on a GPU if it used one."""
        return self.durations_us(label, on_device=True) or self.durations_us(label)

    def shares(self) -> dict[str, Shares]:
        """By party."""
        total_us = sum(burst.timeline.makespan_us for burst in self.bursts)
        found = {}
        for actor in self.plan.programs:
            parts = [Overlap.of(span for span in burst.timeline.spans if span.actor == actor) for burst in self.bursts]
            sums = [
                sum(getattr(part, f"{name}_us") for part in parts) for name in ("compute", "exposed", "hidden", "wait")
            ]
            found[actor] = Shares(*(time_us / total_us for time_us in sums))
        return found

    def predicted(self) -> Timeline:
        """The burst as the simulator sees it, from the medians of what its methods and writes took here."""
        from crossfade.schedule.simulate import simulate

        compute_us = {node.id: median(self.durations_us(f"run {node.id}")) for node in self.plan.nodes}
        on_device = {node.id: self.durations_us(f"run {node.id}", on_device=True) for node in self.plan.nodes}
        kernels_us = {node: median(times_us) for node, times_us in on_device.items() if times_us}
        synchronous = [node.id for node in self.plan.nodes if node.method == "work" and node.id in kernels_us]
        for node in synchronous:  # the host's span ends with the kernels
            compute_us[node] = max(0.0, compute_us[node] - kernels_us[node])
        on_gpus: dict[str, Any] = {"device_us": kernels_us, "synchronous": synchronous} if kernels_us else {}
        arrays = [
            channel for channel in self.plan.channels if channel.writer != DRIVER and channel.readers != (DRIVER,)
        ]
        size_bytes = self.parts.value_bytes
        workload = Workload(
            compute_us=compute_us, value_bytes={channel.value: size_bytes for channel in arrays}, **on_gpus
        )
        costs = CostModel(num_cores=os.cpu_count() or 1, topology=load_topology() or Topology())
        if not self.parts.num_gpus:
            write_us = median([time_us for channel in arrays for time_us in self.durations_us(f"write {channel.id}")])
            costs = replace(costs, write_us_per_mb=write_us / (size_bytes / 1e6))
        timeline = simulate(self.plan, workload, costs, NUM_IN_BURST)
        return replace(timeline, name="predicted")


def measure(program: FanIn, graphs: Sequence[CompiledGraph], num_bursts: int) -> list[Measured]:
    """Runs bursts on the graphs in turn, so that whatever else the machine does falls on all of them alike."""
    results_us: list[list[list[float]]] = [[] for _ in graphs]
    inputs = range(NUM_IN_BURST)
    for _ in range(NUM_WARM + num_bursts):
        for graph, times_us in zip(graphs, results_us, strict=True):
            ends_us, results = in_flight_us(graph, inputs, MAX_INFLIGHT)
            program.check(inputs, results)
            times_us.append(ends_us)
    return [
        Measured(program.parts, graph.plan, tuple(_bursts(graph.timeline(), times_us)[NUM_WARM:]))
        for graph, times_us in zip(graphs, results_us, strict=True)
    ]


def _bursts(timeline: Timeline, results_us: Sequence[Sequence[float]]) -> list[Burst]:
    spans: list[list[Span]] = [[] for _ in results_us]
    for span in timeline.spans:
        number = span.execution // NUM_IN_BURST
        if number < len(spans):
            spans[number].append(span)
    return [Burst(_cut(each), tuple(ends_us)) for each, ends_us in zip(spans, results_us, strict=True)]


def _cut(spans: Sequence[Span]) -> Timeline:
    """One burst's spans on a clock that starts with the driver's first write."""
    start_us = min(span.start_us for span in spans if span.actor == DRIVER and span.kind != WAIT)
    end_us = max(span.end_us for span in spans if span.actor == DRIVER)
    kept = [
        replace(
            span,
            start_us=max(span.start_us - start_us, 0.0),
            end_us=min(span.end_us, end_us) - start_us,
            execution=span.execution % NUM_IN_BURST,
        )
        for span in spans
        if start_us < span.end_us and span.start_us < end_us
    ]
    return Timeline.of("measured", kept)
