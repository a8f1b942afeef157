"""Calibration: what the steps of a plan cost on this machine, measured with tiny graphs on the local engine.

Each figure of `CostModel` comes from a primitive, none from a graph that one would want to predict:

- a write and a read, from recorded spans of an actor that gives the driver small values, then arrays of many sizes, both
  sides awake;
- an action, from a chain of nodes on one actor; it moves nothing, so its length decides its time;
- a hop, from the round trip through one actor: what is left of it when everything else is taken off;
- a wake-up, from an actor that works so long that the one that waits for its array goes to sleep;
- how soon an idle core helps a crowded one, from one actor more than there are cores, all at work;
- a transfer by gloo, from recorded spans of two actors, and what it costs the sender from that process's CPU time;
- a collective by gloo, from recorded spans of two actors that add up a small tensor.

What else runs on the machine meanwhile is measured too: calibrate when it does what it will do later.
"""

from __future__ import annotations

import importlib.util
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from crossfade.api.compiled import CompiledGraph, compile_graph
from crossfade.api.getting import get
from crossfade.api.remote import ActorHandle, remote
from crossfade.api.session import init, is_initialized, shutdown
from crossfade.engines.protocol import DEFAULT_SPIN_US
from crossfade.errors import SessionError
from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.spans import COMMUNICATE, Span
from crossfade.plan.timeline import Timeline
from crossfade.schedule.cost import BYTES_PER_MB, BYTES_PER_US_AT_1_GBS, CostModel
from crossfade.schedule.fit import fit_line
from crossfade.schedule.simulate import simulate
from crossfade.schedule.workload import Workload
from crossfade.types import DRIVER, CollectiveKind

if TYPE_CHECKING:
    import numpy as np

RING_BYTES = (2_000, 20_000, 100_000, 1_000_000, 4_000_000, 8_000_000)
GLOO_BYTES = (1_000, 100_000, 1_000_000, 4_000_000, 8_000_000, 16_000_000)
OTHER_BYTES = 8_000_000
"""What a method touches beside its values: more than a core's own caches hold."""
WAKING_BYTES = 500_000
"""Size of the array that wakes its reader."""
NUM_PER_SIZE = 25
NUM_SMALL = 500
NUM_ROUND_TRIPS = 1_500
NUM_CHAIN_NODES = 65
NUM_CHAINS = 200
NUM_TURNS = 5
MOST_TRIES = 4
NUM_WAKE_UPS = 60
NUM_WARM_UPS = 12
NUM_COLLECTIVES = 60
COLLECTIVE_BYTES = 1_000
"""So small that the size of what is added up does not matter."""

AWAKE_US = 2_000.0
"""For how long a waiting process polls while rings are measured: nobody falls asleep beside a large copy."""
CROWD_US = 15_000.0
"""How long each of the actors computes that crowd the cores."""
NUM_CROWDS = 25
MOST_CROWDED_CORES = 4
"""With more cores than this, starting an actor for each takes too long, and crowding is rare."""
ASLEEP_US = 4_000.0
"""How long an actor works so that who waits for it sleeps."""


class Probe:
    """The actor of all measures."""

    def __init__(self) -> None:
        import numpy as np

        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self._other = np.zeros(OTHER_BYTES, np.uint8)

    def give(self, size_bytes: int) -> np.ndarray[Any, Any]:
        """An array of that size, made once. Like a method that works, it leaves other data in the caches."""
        import numpy as np

        self._other += 1
        if size_bytes not in self._arrays:
            self._arrays[size_bytes] = np.ones(size_bytes, np.uint8)
        return self._arrays[size_bytes]

    def take(self, array: np.ndarray[Any, Any]) -> int:
        """The size of an array, which is not looked into."""
        return array.nbytes

    def pass_on(self, value: object) -> object:
        return value

    def give_tensor(self, size_bytes: int) -> Any:
        """The same as a torch tensor."""
        import torch

        return torch.from_numpy(self.give(size_bytes))

    def work(self, time_us: float) -> np.ndarray[Any, Any]:
        """Keeps a core busy for that long, then makes an array."""
        end_ns = time.monotonic_ns() + int(time_us * 1_000)
        while time.monotonic_ns() < end_ns:
            self._other += 1
        return self.give(WAKING_BYTES).copy()

    def compute(self, time_us: float) -> float:
        """Takes that much CPU time, however long it lasts."""
        end_ns = time.thread_time_ns() + int(time_us * 1_000)
        while time.thread_time_ns() < end_ns:
            pass
        return time_us

    def cpu_us(self) -> float:
        """CPU time of this process, all threads, since it started."""
        return time.process_time() * 1e6


def calibrate(progress: Callable[[str, float], None] | None = None) -> CostModel:
    """Measures what moving values costs on this machine; takes 5 to 15 seconds.

    Calibration has sessions of its own, since actors of another one would take cores from what is measured: it is refused
    while one is running, and afterwards none is.

    Args:
        progress: called before each stage with its name, and after the last one, with the part that is done, 0 to 1.

    Returns:
        A model for ``graph.predicted_timeline(workload, costs)``. Where torch is not installed, the figures of gloo are
        the defaults. Slowdowns are left at 1: on few cores they cannot be told from sharing the cores.

    Raises:
        SessionError: a session is running.
    """
    if is_initialized():
        raise SessionError(
            "calibrate() was called while a session is running, whose actors would disturb it",
            hint="calibrate before the first actor, or call crossfade.shutdown() first; CostModel.to_json() keeps the result",
        )
    tell = progress or (lambda stage, done: None)
    costs = CostModel(num_cores=len(os.sched_getaffinity(0)), spin_us=DEFAULT_SPIN_US)
    tell("starting an actor", 0.0)
    with _probes(1, spin_us=AWAKE_US) as (probe,):
        for stage, measure, done in (
            ("small values", _measure_small, 0.1),
            ("large values", _measure_large, 0.2),
            ("actions", _measure_steps, 0.35),
            ("hops", _measure_hops, 0.4),
        ):
            tell(stage, done)
            costs = measure(probe, costs)
    tell("wake-ups", 0.45)
    is_crowdable = costs.num_cores <= MOST_CROWDED_CORES
    with _probes(max(2, costs.num_cores + 1) if is_crowdable else 2, spin_us=DEFAULT_SPIN_US) as probes:
        sender, receiver, *_ = probes
        costs = _measure_wake_ups(sender, receiver, costs)
        if is_crowdable:
            tell("crowded cores", 0.5)
            costs = _measure_balance(probes, costs)
        if importlib.util.find_spec("torch") is not None:
            tell("transfers by gloo", 0.6)
            costs = _measure_gloo(sender, receiver, costs)
            tell("collectives by gloo", 0.9)
            costs = _measure_collectives((sender, receiver), costs)
    tell("done", 1.0)
    return costs


@contextmanager
def _probes(num: int, *, spin_us: float) -> Iterator[list[ActorHandle]]:
    """A session with that many actors."""
    init(engine="local", spin_us=spin_us)
    try:
        yield [remote(Probe).remote() for _ in range(num)]
    finally:
        shutdown()


def _measure_small(probe: ActorHandle, costs: CostModel) -> CostModel:
    """Values that fit into a ring's records."""
    with InputNode() as inp:
        node = probe.pass_on.bind(inp)
    with compile_graph(node, max_inflight=1, record=True) as graph:
        _round_trips_us(graph, NUM_SMALL)
        timeline = graph.timeline()
    moves = moves_of(timeline, node.actor.id, "write n0"), moves_of(timeline, DRIVER, "read n0")
    write_us, read_us = (statistics.median(spans[-1].duration_us for spans in each.values()) for each in moves)
    clock_us = _clock_us()
    return replace(costs, write_us=max(0.0, write_us - clock_us), read_us=max(0.0, read_us - clock_us))


def _measure_large(probe: ActorHandle, costs: CostModel) -> CostModel:
    """Arrays, which need slots."""
    with InputNode() as inp:
        node = probe.give.bind(inp)
    with compile_graph(node, max_inflight=1, record=True) as graph:
        sizes, timeline = run_sizes(graph, RING_BYTES, lambda size, array: array.nbytes == size)
    write_us, write_us_per_byte = fit_line(points_of(sizes, moves_of(timeline, node.actor.id, "write n0")))
    read_us, read_us_per_byte = fit_line(points_of(sizes, moves_of(timeline, DRIVER, "read n0")))
    return replace(
        costs,
        write_large_us=max(0.0, write_us - costs.write_us),
        write_us_per_mb=write_us_per_byte * BYTES_PER_MB,
        read_large_us=max(0.0, read_us - costs.read_us),
        read_us_per_mb=read_us_per_byte * BYTES_PER_MB,
    )


def _measure_steps(probe: ActorHandle, costs: CostModel) -> CostModel:
    """Each further node of a chain on one actor adds two actions: its run, and the release of what it was given. Both chains take
    turns, so what slows the machine down for a while slows both; of each the fastest counts, since other processes only add. On a
    busy machine no trip of the short one may be fast: more turns follow then.
    """
    trips_us: dict[int, list[float]] = {1: [], NUM_CHAIN_NODES: []}
    short_us = long_us = 0.0
    for _ in range(MOST_TRIES):
        for num_nodes in [*trips_us] * NUM_TURNS:
            _add_trips(probe, num_nodes, trips_us[num_nodes])
        short_us, long_us = map(min, trips_us.values())
        if short_us < long_us:
            break
    return replace(costs, step_us=max(0.0, long_us - short_us) / (2 * (NUM_CHAIN_NODES - 1)))


def _add_trips(probe: ActorHandle, num_nodes: int, trips_us: list[float]) -> None:
    """Round trips through a chain of so many nodes."""
    with InputNode() as inp:
        node = probe.pass_on.bind(inp)
        for _ in range(num_nodes - 1):
            node = probe.pass_on.bind(node)
    with compile_graph(node, max_inflight=1) as graph:
        trips_us += _round_trips_us(graph, NUM_CHAINS // NUM_TURNS)


def _measure_hops(probe: ActorHandle, costs: CostModel) -> CostModel:
    """What the round trip through one actor takes beyond its steps is shared by its two hops."""
    with InputNode() as inp:
        node = probe.pass_on.bind(inp)
    with compile_graph(node, max_inflight=1) as graph:
        trip_us = statistics.median(_round_trips_us(graph, NUM_ROUND_TRIPS))
        steps_us = simulate(graph.plan, Workload(), replace(costs, hop_us=0.0)).makespan_us
    return replace(costs, hop_us=max(0.0, trip_us - steps_us) / 2)


def _measure_wake_ups(worker: ActorHandle, reader: ActorHandle, costs: CostModel) -> CostModel:
    """From the start of a write to the end of the read, with a reader that sleeps, beyond what it takes with one that polls."""
    with InputNode() as inp:
        made = worker.work.bind(inp)
        node = reader.take.bind(made)
    with compile_graph(node, max_inflight=1, record=True) as graph:
        for _ in range(NUM_WAKE_UPS):
            get(graph.execute(ASLEEP_US))
        timeline = graph.timeline()
    writes, reads = moves_of(timeline, made.actor.id, "write n0"), moves_of(timeline, node.actor.id, "read n0")
    taken_us = [reads[number][-1].end_us - writes[number][0].start_us for number in writes]
    awake_us = costs.write_time_us(WAKING_BYTES) + costs.hop_us + costs.read_time_us(WAKING_BYTES)
    return replace(costs, wake_us=max(0.0, statistics.median(taken_us) - awake_us))


def _measure_balance(probes: Sequence[ActorHandle], costs: CostModel) -> CostModel:
    """One actor more than there are cores, with the same work w each: two share a core, and another is idle from w on.

    At w + b it takes one of the two over: each has (w + b) / 2 behind it, and they end at w + (w + b) / 2. If they share
    the core to their end at 2 w, b is w at least.
    """
    with InputNode() as inp:
        crowd = MultiOutputNode([probe.compute.bind(inp) for probe in probes])
    with compile_graph(crowd, max_inflight=1) as graph:
        taken_us = []
        for _ in range(NUM_CROWDS):
            start_ns = time.perf_counter_ns()
            get(graph.execute(CROWD_US))
            taken_us.append((time.perf_counter_ns() - start_ns) / 1_000)
    taken = statistics.median(taken_us) - costs.wake_us
    return replace(costs, balance_us=min(CROWD_US, max(0.0, 2 * taken - 3 * CROWD_US)))


def _measure_gloo(sender: ActorHandle, receiver: ActorHandle, costs: CostModel) -> CostModel:
    with InputNode() as inp:
        made = sender.give.bind(inp).with_tensor_transport(transport="gloo")
        node = receiver.take.bind(made)
    with compile_graph(node, max_inflight=2, record=True) as graph:
        sizes, timeline = run_sizes(graph, GLOO_BYTES, lambda size, got: got == size)
        cpu_us = [point for size in GLOO_BYTES for point in _cpu_points(graph, sender, size)]
    sends, receives = moves_of(timeline, made.actor.id, "send n0"), moves_of(timeline, node.actor.id, "recv n0")
    reads = moves_of(timeline, node.actor.id, "read n0")
    starts = {number: min(spans, key=lambda span: span.start_us) for number, spans in sends.items() if number in sizes}
    host_us = statistics.median(span.duration_us for span in starts.values())
    latency_us, per_byte_us = fit_line(
        (sizes[number], reads[number][-1].end_us - start.end_us) for number, start in starts.items()
    )
    return replace(
        costs,
        host_us=host_us,
        receive_host_us=statistics.median(min(span.duration_us for span in spans) for spans in receives.values()),
        latency_us=latency_us,
        gbs=1 / (max(per_byte_us, 1e-9) * BYTES_PER_US_AT_1_GBS),
        host_us_per_mb=min(per_byte_us, fit_line(cpu_us)[1]) * BYTES_PER_MB,
    )


def _measure_collectives(parties: Sequence[ActorHandle], costs: CostModel) -> CostModel:
    """From the last party's start until all have the sum."""
    with InputNode() as inp:
        sums = bind_collective(CollectiveKind.ALLREDUCE, [party.give_tensor.bind(inp) for party in parties])
        taken = [party.take.bind(each) for party, each in zip(parties, sums, strict=True)]
    with compile_graph(MultiOutputNode(taken), max_inflight=1, record=True) as graph:
        for _ in range(NUM_WARM_UPS + NUM_COLLECTIVES):
            get(graph.execute(COLLECTIVE_BYTES))
        timeline = graph.timeline()
    spans = [moves_of(timeline, node.actor.id, "coll ") for node in taken]
    times_us = []
    for number in range(NUM_WARM_UPS, NUM_WARM_UPS + NUM_COLLECTIVES):
        start_us = max(min(span.start_us for span in of_party[number]) for of_party in spans)
        times_us.append(max(span.end_us for of_party in spans for span in of_party[number]) - start_us)
    return replace(costs, collective_us=statistics.median(times_us))


def _cpu_points(graph: CompiledGraph, sender: ActorHandle, size_bytes: int) -> list[tuple[float, float]]:
    """(size, CPU time of the sender's process for one execution), a few times."""
    points = []
    for _ in range(3):
        before_us = get(sender.cpu_us.remote())
        for _ in range(5):
            get(graph.execute(size_bytes))
        points.append((float(size_bytes), (get(sender.cpu_us.remote()) - before_us) / 5))
    return points


def run_sizes(
    graph: CompiledGraph, sizes_bytes: Sequence[int], is_right: Callable[[int, Any], bool]
) -> tuple[dict[int, int], Timeline]:
    """Executes a recorded graph with every size, shuffled, after a warm-up with the largest one, which makes the slots.

    Returns the size of each execution by its number, and the timeline. Raises a RuntimeError for a wrong value.
    """
    sizes = [*sizes_bytes] * NUM_PER_SIZE
    random.Random(0).shuffle(sizes)
    sizes = [max(sizes_bytes)] * NUM_WARM_UPS + sizes
    for size in sizes:
        got = get(graph.execute(size))
        if not is_right(size, got):
            raise RuntimeError(f"calibration asked for {size} bytes and got {got!r}\nhint: this is a bug in crossfade")
        del got
    return {number: size for number, size in enumerate(sizes) if number >= NUM_WARM_UPS}, graph.timeline()


def _round_trips_us(graph: CompiledGraph, num: int) -> list[float]:
    times_us = []
    for _ in range(num + NUM_WARM_UPS):
        start_ns = time.perf_counter_ns()
        graph.execute(1).get()
        times_us.append((time.perf_counter_ns() - start_ns) / 1_000)
    return times_us[NUM_WARM_UPS:]


def moves_of(timeline: Timeline, actor: str, label: str) -> dict[int, list[Span]]:
    """The actor's moves of that kind, by execution, in order; its waits left out."""
    found: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if span.actor == actor and span.kind == COMMUNICATE and span.label.startswith(label):
            found.setdefault(span.execution, []).append(span)
    return found


def points_of(sizes: dict[int, int], spans: dict[int, list[Span]]) -> list[tuple[float, float]]:
    """(size in bytes, time in us) of each execution's move."""
    return [(size, spans[number][-1].duration_us) for number, size in sizes.items()]


def _clock_us() -> float:
    """What looking at the clock costs."""
    times_ns = [time.monotonic_ns() for _ in range(1_000)]
    return statistics.median(after - before for before, after in pairwise(times_ns)) / 1_000
