"""The simulator on plans with collectives between GPUs, against times derived by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import InputNode, MultiOutputNode, Node
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Span, Timeline
from crossfade.plan.validate import find_fault
from crossfade.schedule.collective_costs import estimate
from crossfade.schedule.cost import CostModel
from crossfade.schedule.simulate import simulate
from crossfade.schedule.workload import Workload
from crossfade.topology import Slowdown
from crossfade.types import CollectiveKind, Transport
from tests.helpers.four_gpus import MB, four_h200
from tests.helpers.small_graphs import actor, call, compiled, draw_collectives, only, times
from tests.unit.test_simulate_gpus import COSTS

COLLECTED = replace(COSTS, collective_host_us=1.0)
WORK = Workload({"f": 1.0, "g": 1.0}, device_us={"A.f": 10.0, "B.f": 30.0, "g": 20.0}, default_value_bytes=4 * MB)


def summed(*, overlap: bool, transport: str | None = None, between: bool = False) -> Plan:
    """A.f and B.f are summed; A.g and B.g take the sums, each after another call of g if asked for."""
    actors, inp = [actor("A", 0), actor("B", 1)], InputNode()
    sums = bind_collective(CollectiveKind.ALLREDUCE, [call(each, "f", inp) for each in actors], transport=transport)
    others = [call(each, "g", inp) for each in actors] if between else []
    taken = [call(each, "g", value) for each, value in zip(actors, sums, strict=True)]
    return compiled(MultiOutputNode([*others, *taken]), overlap=overlap)


def alone_us(plan: Plan, costs: CostModel) -> float:
    (spec,) = plan.collectives
    return estimate(costs, spec, (0, 1), [4 * MB]).time_us


def on_coll(found: Timeline, execution: int = 0) -> dict[str, Span]:
    return {span.actor: span for span in found.spans if (span.stream, span.execution) == ("coll", execution)}


@pytest.mark.parametrize("transport", [Transport.COPY, Transport.NCCL])
def test_streams_meet_and_hosts_only_start(transport: Transport) -> None:
    """A's kernels end at 12.75, B's 20 later: A's part is under way from then on, and over when B's is. No host waits for that."""
    plan = summed(overlap=False, transport=transport)
    found, sum_us = simulate(plan, WORK, COLLECTED), alone_us(plan, COLLECTED)
    spans = on_coll(found)
    assert {span.label for span in spans.values()} == {"coll c0"}
    assert times(spans["A"]) == (12.75, round(32.75 + sum_us, 6))
    assert times(spans["B"]) == (32.75, round(32.75 + sum_us, 6))
    for name in "AB":
        used = [s for s in found.spans if (s.actor, s.stream, s.kind) == (name, "compute", "compute")][-1]
        assert times(used) == (round(32.75 + sum_us, 6), round(52.75 + sum_us, 6))
        hosts = [s for s in found.spans if (s.actor, s.stream, s.label) == (name, "main", "coll c0")]
        assert hosts[-1].end_us < 12.75
    assert [note.partition(": ")[0] for note in found.notes] == ["allreduce (collective c0)"]
    assert f"no {transport} from GPU 0 to GPU 1" in found.notes[0]


def test_work_that_takes_nothing_of_it_goes_on_beside_it_where_it_is_only_started() -> None:
    for overlap in (False, True):
        found = simulate(summed(overlap=overlap, between=True), WORK, COLLECTED)
        spans = on_coll(found)
        computed = [s for s in found.spans if (s.actor, s.stream, s.kind) == ("B", "compute", "compute")]
        beside = [s for s in computed if s.start_us < spans["B"].end_us and s.end_us > spans["B"].start_us]
        assert len(beside) == (1 if overlap else 0)


def test_a_collective_beside_kernels_takes_longer_and_so_do_they() -> None:
    plan = summed(overlap=True, between=True)
    topology = replace(four_h200(), slowdowns=(Slowdown("copy", "gemm", 3.0, 2.0),))
    measured = replace(COLLECTED, topology=topology)
    work = replace(WORK, device_us={"A.f": 10.0, "B.f": 10.0, "g": 1e4})
    found = simulate(plan, work, measured)
    assert on_coll(found)["A"].duration_us == pytest.approx(3 * alone_us(plan, measured))
    first = next(s for s in found.spans if (s.actor, s.stream, s.kind) == ("A", "compute", "compute") and "g" in s.what)
    assert first.duration_us == pytest.approx(1e4 + 3 * alone_us(plan, measured) / 2)
    assert found.notes == ()


def test_a_copy_that_leaves_meanwhile_takes_its_share_of_the_link() -> None:
    """Two leave GPU 0 then: A's value for C, and A's part of the sum."""
    a, b, c, inp = actor("A", 0), actor("B", 1), actor("C", 2), InputNode()
    made = [call(each, "f", inp) for each in (a, b)]
    sums = bind_collective(CollectiveKind.ALLREDUCE, made)
    plan = compiled(MultiOutputNode([*sums, call(c, "g", made[0])]), overlap=True)
    work = replace(WORK, device_us={"f": 10.0, "g": 20.0}, default_value_bytes=64 * MB)
    found = simulate(plan, work, replace(COLLECTED, copy_gbs=100.0))
    alone = simulate(
        summed(overlap=True), replace(work, device_us={"f": 10.0, "g": 20.0}), replace(COLLECTED, copy_gbs=100.0)
    )
    assert on_coll(found)["A"].duration_us > 1.2 * on_coll(alone)["A"].duration_us
    assert only(found, "A", "push", "communicate").duration_us > 1.5 * 64 * MB / 1e5


def test_groups_of_other_actors_have_a_stream_of_their_own() -> None:
    """A and B sum a large tensor, B and C then a small one of what is there from the start: it does not wait."""
    a, b, c, inp = actor("A", 0), actor("B", 1), actor("C", 2), InputNode()
    large = bind_collective(CollectiveKind.ALLREDUCE, [call(a, "f", inp), call(b, "f", inp)])
    small = bind_collective(CollectiveKind.ALLREDUCE, [call(b, "g", inp), call(c, "g", inp)])
    plan = compiled(MultiOutputNode([*large, *small]), overlap=True)
    sizes = dict.fromkeys(plan.collectives[1].inputs[0] + plan.collectives[1].inputs[1], 1000)
    work = Workload({"f": 1.0, "g": 1.0}, sizes, device_us={"f": 1.0, "g": 1.0}, default_value_bytes=256 * MB)
    found = simulate(plan, work, COLLECTED)
    ends = {span.label: span.end_us for span in found.spans if (span.actor, span.stream) == ("B", "coll")}
    assert ends["coll c1"] < ends["coll c0"]


def test_what_goes_to_the_driver_is_copied_up_when_it_is_there() -> None:
    actors, inp = [actor("A", 0), actor("B", 1)], InputNode()
    sums = bind_collective(CollectiveKind.BROADCAST, [call(each, "f", inp) for each in actors], root=1)
    found = simulate(compiled(MultiOutputNode(list(sums))), WORK, COLLECTED)
    for name in "AB":
        assert only(found, name, "up", "communicate").start_us == pytest.approx(on_coll(found)[name].end_us)


def test_actors_without_gpus_that_ask_for_copies_are_reckoned_with_as_by_gloo() -> None:
    actors, inp = [actor("A"), actor("B")], InputNode()
    made = [call(each, "f", inp) for each in actors]
    by_copy, by_gloo = (
        simulate(
            compiled(MultiOutputNode(list(bind_collective(CollectiveKind.ALLGATHER, made, transport=transport)))),
            WORK,
            COSTS,
        )
        for transport in (Transport.COPY, Transport.GLOO)
    )
    assert by_copy.spans == by_gloo.spans
    assert by_gloo.notes == ()
    assert by_copy.notes == (
        "allgather (collective c0): not all of its actors have GPUs, and it is reckoned with as if by gloo",
    )


@st.composite
def gpu_graphs(draw: st.DrawFn) -> list[Node]:
    """Random calls and collectives on three actors with GPUs, over all that can carry them."""
    gpus = draw(st.sampled_from([(0, 1, 2), (0, 0, 1)]))
    actors = [actor(name, gpu) for name, gpu in zip("ABC", gpus, strict=True)]
    return draw_collectives(draw, actors, 5, least_parties=2, transports=(None, Transport.NCCL, Transport.GLOO))


@given(outputs=gpu_graphs(), overlap=st.booleans(), max_inflight=st.integers(1, 3), is_measured=st.booleans())
def test_every_sound_plan_comes_to_its_end(
    outputs: list[Node], overlap: bool, max_inflight: int, is_measured: bool
) -> None:
    """Each collective once for each party and execution, one after another in each set of parties."""
    plan = compiled(MultiOutputNode(outputs), max_inflight, overlap=overlap)
    assert find_fault(plan) is None
    costs = replace(COSTS, topology=four_h200()) if is_measured else COSTS
    work = Workload(device_us={"make": 5.0, "take": 3.0}, default_value_bytes=100_000)
    found = simulate(plan, work, costs, 4, max_inflight)
    for spec in plan.collectives:
        shown = [s for s in found.spans if (s.stream, s.label, s.kind) == ("coll", f"coll {spec.id}", "communicate")]
        wanted = [(party, execution) for party in spec.parties for execution in range(4)]
        assert sorted((s.actor, s.execution) for s in shown) == sorted(wanted)
        for execution in range(4):
            assert len({s.end_us for s in shown if s.execution == execution}) == 1
