"""Plans of parties on several hosts: which transport, how many channels, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crossfade.engines.board import heaps_of, places, told_peers, wired_peers
from crossfade.errors import GraphError
from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import ActorInfo, InputNode, MultiOutputNode
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.schedule.cost import CostModel
from crossfade.schedule.simulate import simulate
from crossfade.schedule.workload import Workload
from crossfade.types import DRIVER, CollectiveKind, Transport
from tests.helpers import small_graphs

A, B, C, D = map(small_graphs.actor, "ABCD")
HOSTS = {DRIVER: "10.0.0.1", "A": "10.0.0.1", "B": "10.0.0.2", "C": "10.0.0.2", "D": "10.0.0.3"}


def work(actor: ActorInfo, value: object) -> Any:
    return small_graphs.call(actor, "work", value)


def compiled(output: Any, hosts: dict[str, str] = HOSTS) -> Plan:
    return small_graphs.compiled(output, overlap=False, hosts=hosts)


def fan_out() -> MultiOutputNode:
    value = work(A, InputNode())
    return MultiOutputNode([work(actor, value) for actor in (B, C, D)])


def test_readers_of_a_host_share_a_channel_and_hosts_do_not() -> None:
    plan = compiled(fan_out())
    channels = {spec.readers: spec.transport for spec in plan.channels if spec.value == "n0"}
    assert channels == {("B", "C"): Transport.TCP, ("D",): Transport.TCP}
    assert {spec.transport for spec in plan.channels if spec.value == "i0"} == {Transport.SHM}


def test_the_driver_is_never_the_landing_beside_an_actor() -> None:
    value = work(B, InputNode())
    plan = compiled(MultiOutputNode([value, work(A, value)]))
    (spec,) = [spec for spec in plan.channels if spec.value == "n0"]
    assert spec.readers == ("A", DRIVER)
    assert spec.landing == "A"


def test_actors_without_input_are_told_to_start_on_each_host() -> None:
    plan = compiled(MultiOutputNode([work(actor, 1) for actor in (A, B, C, D)]))
    starts = {spec.readers: spec.transport for spec in plan.channels if spec.value == "i0"}
    assert starts == {("A",): Transport.SHM, ("B", "C"): Transport.TCP, ("D",): Transport.TCP}


def test_rings_lie_where_they_are_read() -> None:
    plan = compiled(fan_out())
    on_second = {place.spec.readers for place in places(plan, "10.0.0.2")}
    assert on_second == {("B", "C")}
    assert heaps_of(plan, "C") == ("B<",)
    assert wired_peers(plan, "C") == [DRIVER]  # what comes from A comes to B for both
    assert wired_peers(plan, "B") == ["A", DRIVER]


def test_a_plan_with_hosts_is_read_back() -> None:
    plan = compiled(fan_out())
    assert "host 10.0.0.2 = B, C" in str(plan)
    assert parse_plan(str(plan)) == plan


def test_on_one_host_nothing_is_said_of_hosts() -> None:
    plan = compiled(fan_out(), {})
    assert not plan.hosts
    assert {spec.transport for spec in plan.channels} == {Transport.SHM}


@pytest.mark.parametrize("transport", ["shm", "gloo", "copy", "staged"])
def test_what_stays_within_a_host_is_refused_between_two(transport: str) -> None:
    value = work(A, InputNode())
    value.with_tensor_transport(transport)
    with pytest.raises(GraphError, match=r"A is on 10\.0\.0\.1 and B on 10\.0\.0\.2\nhint: .*'tcp'"):
        compiled(work(B, value))


def test_tcp_is_refused_within_a_host() -> None:
    value = work(B, InputNode())
    value.with_tensor_transport("tcp")
    with pytest.raises(GraphError, match="are on one host"):
        compiled(work(C, value))


def test_collectives_between_hosts_take_what_goes_there() -> None:
    """gloo for actors without GPUs; and with them NCCL, also where copies would reach within a host."""
    for gpus, transport in (((), Transport.GLOO), ((0,), Transport.NCCL)):
        inp = InputNode()
        nodes = [work(replace(actor, gpus=gpus), inp) for actor in (A, B)]
        plan = compiled(MultiOutputNode(bind_collective(CollectiveKind.ALLREDUCE, nodes)))
        assert plan.collectives[0].transport is transport
        assert told_peers(plan, "A") == ["B"]
        assert told_peers(plan, DRIVER) == []


def test_copies_do_not_reach_from_host_to_host() -> None:
    inp = InputNode()
    nodes = [work(replace(actor, gpus=(0,)), inp) for actor in (A, B)]
    with pytest.raises(
        GraphError, match=r"'copy', and its actors are on several hosts: A on 10\.0\.0\.1, B on 10\.0\.0\.2"
    ):
        compiled(MultiOutputNode(bind_collective(CollectiveKind.ALLREDUCE, nodes, transport="copy")))


def test_gpus_of_several_hosts_are_connected_by_nccl_and_each_host_has_a_channel() -> None:
    """GPU 0 of one host is not GPU 0 of another."""
    a, b, c, d = (replace(actor, gpus=(0,)) for actor in (A, B, C, D))
    value = work(a, InputNode())
    plan = compiled(MultiOutputNode([work(actor, value) for actor in (b, c, d)]))
    made = [spec for spec in plan.channels if spec.value == "n0"]
    assert [(spec.transport, spec.readers) for spec in made] == [(Transport.NCCL, ("B", "C")), (Transport.NCCL, ("D",))]
    assert parse_plan(str(plan)) == plan
    assert wired_peers(plan, "A") == ["B", "D"]
    assert told_peers(plan, "A") == ["B", "C", "D"]
    assert "B<" in heaps_of(plan, "B")


def test_gpus_that_hosts_count_alike_are_not_one_gpu_in_a_prediction() -> None:
    """Two actors compute at once on GPU 0 of two hosts; on one GPU they would take turns."""
    b, d = (replace(actor, gpus=(0,)) for actor in (B, D))
    inp = InputNode()
    plan = compiled(MultiOutputNode([work(b, inp), work(d, inp)]))
    workload = Workload(device_us={"work": 10_000.0})
    assert simulate(plan, workload, CostModel()).makespan_us < 15_000
    shared = compiled(MultiOutputNode([work(b, inp), work(replace(C, gpus=(0,)), inp)]))
    assert simulate(shared, workload, CostModel()).makespan_us > 15_000
    value = work(b, inp)
    between = compiled(work(d, value))
    assert [str(spec.transport) for spec in between.channels if spec.value == "n0"] == ["nccl"]
    assert simulate(between, workload, CostModel()).makespan_us > 20_000


def test_what_needs_a_gpu_is_refused_without_one_between_hosts_too() -> None:
    value = work(A, InputNode())
    value.with_tensor_transport("accelerator")
    with pytest.raises(GraphError, match="A and B have none"):
        compiled(work(B, value))


def test_tensors_that_go_by_tcp_arrive_on_the_cpu() -> None:
    value = work(A, InputNode())
    value.with_tensor_transport("tcp", "cuda")
    with pytest.raises(GraphError, match="arrives on the CPU"):
        compiled(work(replace(B, gpus=(0,)), value))
