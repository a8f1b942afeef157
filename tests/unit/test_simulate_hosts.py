"""The simulator on several hosts: the network's arithmetic by hand, and the path that bounds a prediction."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.cluster import GpuLink, HostGroup, Network
from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.plan.text import format_plan
from crossfade.schedule.bounds import predict_bounds
from crossfade.schedule.cost import CostModel
from crossfade.schedule.simulate import Simulation, simulate
from crossfade.schedule.workload import Workload
from crossfade.topology import Topology
from crossfade.types import DRIVER, CollectiveKind, Transport
from tests.helpers.small_graphs import actor, call, compiled, gpu_graphs

GBS = 10.0
LATENCY_US = 50.0
MB = 1_000_000
TIME_US = MB / GBS / 1e3
"""Of a value of 1 MB, alone."""
FREE: dict[str, Any] = dict.fromkeys(
    [
        "write_us",
        "write_large_us",
        "write_us_per_mb",
        "read_us",
        "read_large_us",
        "read_us_per_mb",
        "hop_us",
        "wake_us",
        "step_us",
        "tcp_us",
        "tcp_us_per_mb",
        "push_host_us",
        "accept_host_us",
        "collective_host_us",
        "kernel_us",
        "host_us",
        "receive_host_us",
        "latency_us",
        "host_us_per_mb",
        "nccl_us",
        "collective_us",
        "up_us",
    ],
    0.0,
)
"""Nothing but the network costs anything."""


def cluster(num_nics: int = 1, num_gpus: int = 4, num_hosts: int = 4) -> Topology:
    network = Network(GBS, LATENCY_US, num_nics)
    return Topology(hosts=(HostGroup(network, 8, num_hosts, num_gpus, GpuLink(100.0, 0.0)),))


def costs_of(topology: Topology) -> CostModel:
    return CostModel(topology=topology, **{**FREE, "gbs": 1000.0})


def on_hosts(output: Any, hosts: Mapping[str, str], topology: Topology, **options: Any) -> Plan:
    uuids = dict(enumerate(topology.cluster.gpu_names))
    return compiled(
        output, hosts={DRIVER: "host0", **hosts}, topology=topology, uuids=uuids, is_described=True, **options
    )


def ends_us(plan: Plan, topology: Topology, workload: Workload) -> dict[str, float]:
    """When each actor has taken what it needs, that is, begins to compute."""
    timeline = simulate(plan, workload, costs_of(topology))
    return {span.actor: span.start_us for span in timeline.spans if span.what == "take"}


def sent(*pairs: tuple[str, str], gpus: Mapping[str, int] | None = None) -> MultiOutputNode:
    """Values from writers to readers, all made at once."""
    gpus = gpus or {}
    actors = {name: actor(name, *([gpus[name]] if name in gpus else [])) for pair in pairs for name in pair}
    inp = InputNode()
    made = {writer: call(actors[writer], "make", inp) for writer in dict.fromkeys(writer for writer, _ in pairs)}
    return MultiOutputNode([call(actors[reader], "take", made[writer]) for writer, reader in pairs])


BIG = Workload(value_bytes={"make": MB}, default_value_bytes=0)
ON = {"A": "host0", "B": "host0", "C": "host1", "D": "host2", "E": "host1"}


def test_a_value_takes_its_bytes_and_the_latency_to_another_host() -> None:
    plan = on_hosts(sent(("A", "C")), ON, cluster())
    assert plan.channel["n0"].transport is Transport.TCP
    start_us = LATENCY_US  # the input is at A at once, and is not needed at C
    assert ends_us(plan, cluster(), BIG) == pytest.approx({"C": TIME_US + start_us})


def test_transfers_that_leave_or_reach_a_host_share_its_nic() -> None:
    out = on_hosts(sent(("A", "C"), ("B", "D")), ON, cluster())
    assert ends_us(out, cluster(), BIG) == pytest.approx(dict.fromkeys("CD", 2 * TIME_US + LATENCY_US))
    into = on_hosts(sent(("C", "A"), ("D", "B")), ON, cluster())
    assert ends_us(into, cluster(), BIG) == pytest.approx(
        dict.fromkeys("AB", 2 * TIME_US + 2 * LATENCY_US)
    )  # the input too
    both_ways = on_hosts(sent(("A", "C"), ("E", "B")), ON, cluster())
    assert ends_us(both_ways, cluster(), BIG) == pytest.approx(
        {"C": TIME_US + LATENCY_US, "B": TIME_US + 2 * LATENCY_US}
    )


def test_with_a_nic_for_each_they_do_not() -> None:
    topology = cluster(num_nics=3)
    plan = on_hosts(sent(("A", "C"), ("B", "D")), {"A": "host0", "B": "host0", "C": "host1", "D": "host2"}, topology)
    assert ends_us(plan, topology, BIG) == pytest.approx(dict.fromkeys("CD", TIME_US + LATENCY_US))


def test_a_value_for_several_readers_of_a_host_crosses_once() -> None:
    plan = on_hosts(sent(("A", "C"), ("A", "E"), ("A", "D"), ("A", "B")), ON, cluster())
    assert [(each.id, each.transport, each.readers) for each in plan.channels if each.value == "n0"] == [
        ("n0", "tcp", ("C", "E")),
        ("n0~tcp-host2", "tcp", ("D",)),
        ("n0~shm", "shm", ("B",)),
    ]
    simulation = Simulation(plan, BIG, costs_of(cluster()))
    simulation.run()
    crossed = [each.where for each in simulation.moves if each.end_us - each.start_us > LATENCY_US]
    assert crossed == ["host0 -> host1", "host0 -> host2"]
    begun = ends_us(plan, cluster(), BIG)
    assert begun == pytest.approx(
        {"B": 0.0, "C": 2 * TIME_US + LATENCY_US, "E": 2 * TIME_US + LATENCY_US, "D": begun["C"]}
    )


def test_values_between_gpus_of_two_hosts_go_by_nccl_and_share_a_nic() -> None:
    gpus = {"A": 0, "B": 3, "C": 4, "D": 8}
    workload = Workload(value_bytes={"make": MB}, device_us={"take": 1.0}, default_value_bytes=0)
    graph = sent(("A", "C"), ("B", "D"), gpus=gpus)
    for num_nics, times in ((1, 2), (2, 1)):
        topology = cluster(num_nics)
        plan = on_hosts(graph, {"A": "host0", "B": "host0", "C": "host1", "D": "host2"}, topology)
        assert {plan.channel[name].transport for name in ("n0", "n1")} == {Transport.NCCL}
        timeline = simulate(plan, workload, costs_of(topology))
        begun = [span.start_us for span in timeline.spans if span.stream == "compute" and span.what == "take"]
        assert max(begun) == pytest.approx(times * TIME_US + LATENCY_US, rel=1e-5)


def test_work_shares_the_cores_of_its_host_only() -> None:
    topology = Topology(hosts=(HostGroup(Network(GBS, 0.0), num_cores=1, num=2),))
    inp = InputNode()
    output = MultiOutputNode([call(actor(name), "work", inp) for name in "ABC"])
    workload = Workload(compute_us={"work": 100.0}, default_value_bytes=0)
    crowded = on_hosts(output, {"A": "host0", "B": "host1", "C": "host1"}, topology)
    timeline = simulate(crowded, workload, costs_of(topology))
    assert {actor: timeline.compute_us(actor) for actor in "ABC"} == pytest.approx({"A": 100, "B": 200, "C": 200})


@pytest.mark.parametrize(("num_hosts", "num_nics", "gbs"), [(1, 1, 100.0), (2, 1, 10.0), (2, 4, 40.0), (4, 4, 40.0)])
def test_a_collective_takes_all_nics_between_hosts(num_hosts: int, num_nics: int, gbs: float) -> None:
    topology = cluster(num_nics)
    actors = [actor(f"A{i}", i) for i in range(4 * num_hosts)]
    inp = InputNode()
    made = [call(each, "make", inp) for each in actors]
    reduced = bind_collective(CollectiveKind.ALLREDUCE, made, transport=Transport.NCCL)
    output = MultiOutputNode([call(each, "take", value) for each, value in zip(actors, reduced, strict=True)])
    plan = on_hosts(output, {each.id: f"host{i // 4}" for i, each in enumerate(actors)}, topology)
    workload = Workload(value_bytes={"make": 100 * MB}, default_value_bytes=0)
    simulation = Simulation(plan, workload, costs_of(topology))
    simulation.run()
    (over,) = [each for each in simulation.moves if each.where.startswith("allreduce")]
    num = len(actors)
    latency_us = 2 * (num_hosts - 1).bit_length() * LATENCY_US
    moved_us = 2 * (num - 1) / num * 100 * MB / gbs / 1e3
    memory_us = 2 * 100 * MB / CostModel().memory_gbs / 1e3
    assert over.end_us - over.start_us == pytest.approx(latency_us + moved_us + memory_us, rel=0.01)


# What bounds it


def test_the_slowest_actor_and_the_slowest_link_bound_a_pipeline() -> None:
    stages = [actor(name) for name in "ABC"]
    inp = InputNode()
    values: list[Any] = []
    for _ in range(8):
        first = call(stages[0], "f", inp)
        values.append(call(stages[2], "take", call(stages[1], "g", first)))
    plan = on_hosts(MultiOutputNode(values), {"A": "host0", "B": "host0", "C": "host1"}, cluster())
    computing = Workload(compute_us={"f": 10.0, "g": 1000.0, "take": 10.0}, default_value_bytes=0)
    _, bounds = predict_bounds(plan, computing, costs_of(cluster()))
    assert bounds.actors[0].name == "B"
    assert bounds.actors[0].share == pytest.approx(8000 / bounds.step_us)
    assert bounds.actors[0].busy == pytest.approx(8000 / bounds.step_us)
    assert bounds.actors[0].host == "host0"
    moving = Workload(
        compute_us={"f": 10.0, "g": 10.0, "take": 10.0}, value_bytes={"g": 10 * MB}, default_value_bytes=0
    )
    _, bounds = predict_bounds(plan, moving, costs_of(cluster()))
    assert bounds.links[0].name == "host0 -> host1"
    assert bounds.links[0].share > 0.95 < bounds.links[0].busy


@settings(max_examples=60, deadline=None)
@given(gpu_graphs(), st.lists(st.sampled_from(["host0", "host1", "host2"]), min_size=3, max_size=3), st.integers(1, 3))
def test_the_critical_path_fills_the_predicted_time_without_a_gap(graph: Any, names: list[str], num: int) -> None:
    for topology, hosts in ((Topology(), None), (cluster(num_gpus=3), {f"A{i}": names[0] for i in range(3)})):
        apart = {"hosts": {DRIVER: names[1], **(hosts or {})}, "topology": topology, "is_described": True}
        options: dict[str, Any] = {} if hosts is None else apart
        plan = compiled(graph, **options)
        workload = Workload(default_compute_us=5.0, default_value_bytes=200_000, device_us={"make": 30.0})
        simulation = Simulation(plan, workload, CostModel(topology=topology), num)
        timeline = simulation.run()
        path = simulation.critical_path()
        assert path[0].start_us == 0.0
        assert path[-1].end_us == pytest.approx(max(span.end_us for span in timeline.spans), abs=1.0)
        for before, after in pairwise(path):
            assert before.end_us == pytest.approx(after.start_us)
        _, bounds = predict_bounds(plan, workload, CostModel(topology=topology), num)
        shares = sum(each.share + each.handling for each in bounds.actors) + sum(each.share for each in bounds.links)
        assert shares + bounds.waking == pytest.approx(1.0)


def test_a_plan_for_several_hosts_parses() -> None:
    plan = on_hosts(sent(("A", "C"), ("B", "D")), ON, cluster())
    assert "host host0 = driver, A, B" in str(plan)
    assert parse_plan(format_plan(plan)) == plan


# Large graphs


def _pipeline(num_stages: int, num_microbatches: int, *, has_gpus: bool) -> MultiOutputNode:
    stages = [actor(f"A{i}", *([i] if has_gpus else [])) for i in range(num_stages)]
    inp = InputNode()
    ends = []
    for _ in range(num_microbatches):
        value: Any = inp
        kept = []
        for stage in stages:
            value = call(stage, "f", value)
            kept.append(value)
        for stage, own in zip(reversed(stages), reversed(kept), strict=True):
            value = call(stage, "grad", value, own) if value is not own else call(stage, "grad", value)
        ends.append(value)
    return MultiOutputNode(ends)


def _replicas(num_replicas: int, num_layers: int, *, has_gpus: bool) -> MultiOutputNode:
    replicas = [actor(f"A{i}", *([i] if has_gpus else [])) for i in range(num_replicas)]
    inp = InputNode()
    values: list[Any] = [inp] * num_replicas
    for _ in range(num_layers):
        made = [call(each, "grad", value) for each, value in zip(replicas, values, strict=True)]
        values = list(bind_collective(CollectiveKind.ALLREDUCE, made))
    return MultiOutputNode([call(each, "step", value) for each, value in zip(replicas, values, strict=True)])


def _num_calls_an_action(output: MultiOutputNode, num_actors: int) -> float:
    """Python functions that planning, checking, simulating and looking for bounds call."""
    topology = cluster(num_nics=2, num_gpus=8, num_hosts=num_actors // 8)
    hosts = {f"A{i}": f"host{i // 8}" for i in range(num_actors)}
    num_calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        plan = on_hosts(output, hosts, topology)
        workload = Workload(compute_us={"f": 10.0}, device_us={"f": 100.0, "grad": 200.0}, default_value_bytes=1000)
        predict_bounds(plan, workload, costs_of(topology))
    finally:
        sys.setprofile(None)
    return num_calls / sum(map(len, plan.programs.values()))


@pytest.mark.parametrize("has_gpus", [False, True])
@pytest.mark.parametrize("graph", [_pipeline, _replicas])
def test_work_for_each_action_does_not_grow_with_the_graph(graph: Any, has_gpus: bool) -> None:
    few = _num_calls_an_action(graph(16, 8, has_gpus=has_gpus), 16)
    many = _num_calls_an_action(graph(64, 8, has_gpus=has_gpus), 64)
    assert many < 1.25 * few
