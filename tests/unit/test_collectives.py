"""Collectives in a graph: what may be bound, what plans come out, when the simulator ends them."""

from __future__ import annotations

import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossfade
from crossfade.errors import GraphError, UnknownTransport
from crossfade.graph.check import CheckedGraph, check
from crossfade.graph.collectives import bind_collective
from crossfade.graph.draw import to_ascii, to_dot, to_svg
from crossfade.graph.nodes import InputNode, MultiOutputNode, Node
from crossfade.graph.type_hints import TorchTensorType
from crossfade.plan.actions import COLL_STREAM, MAIN, Verb
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.plan.validate import find_fault
from crossfade.schedule.compile import compile_plan
from crossfade.schedule.cost import CostModel
from crossfade.schedule.simulate import simulate
from crossfade.schedule.workload import Workload
from crossfade.types import CollectiveKind, ReduceOp, Transport
from tests.helpers.explore import explore
from tests.helpers.small_graphs import actor, call, draw_collectives

GOLDEN = Path(__file__).parent.parent / "golden"
TRANSPORTS = ("auto", "shm", "gloo")
ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST = CollectiveKind


A, B, C = actor("A"), actor("B"), actor("C")


def checked(*outputs: Node) -> CheckedGraph:
    return check(MultiOutputNode(outputs), session="s", transports=TRANSPORTS)


def compiled(*outputs: Node, overlap: bool = False, max_inflight: int = 2) -> Plan:
    plan, _ = compile_plan(checked(*outputs), max_inflight=max_inflight, overlap=overlap)
    assert parse_plan(str(plan)) == plan
    return plan


def trainers() -> list[Node]:
    """Two actors make gradients, work on something else while these are reduced, and take a step."""
    inp = InputNode()
    reduced = bind_collective(ALLREDUCE, [call(each, "grad", inp) for each in (A, B)])
    others = [call(each, "work", inp) for each in (A, B)]
    return [call(each, "step", *pair) for each, pair in zip((A, B), zip(reduced, others, strict=True), strict=True)]


# Binding


@pytest.mark.parametrize("kind", [ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST])
def test_a_list_of_nodes_gives_a_list_of_nodes(kind: CollectiveKind) -> None:
    inp = InputNode()
    given_nodes = [call(each, "grad", inp) for each in (A, B, C)]
    outputs = bind_collective(kind, given_nodes)
    assert [output.actor for output in outputs] == [A, B, C]
    graph = checked(*outputs)
    assert [collective.inputs for collective in graph.collectives] == [tuple(given_nodes)]
    assert repr(outputs[1]) == f"CollectiveOutput({kind}(A, B, C)[B])"


def test_buckets_are_lists_of_each_actor_or_of_each_tensor() -> None:
    inp = InputNode()
    a1, a2, b1, b2 = (call(each, "grad", inp) for each in (A, A, B, B))
    by_actor = bind_collective(ALLREDUCE, [[a1, a2], [b1, b2]])
    by_tensor = bind_collective(ALLREDUCE, [[a1, b1], [a2, b2]])
    for outputs in (by_actor, by_tensor):
        assert [[output.actor.id for output in row] for row in outputs] == [["A", "A"], ["B", "B"]]
        assert outputs[0][0].parent.members == ((a1, a2), (b1, b2))
    assert [output.actor.id for output in bind_collective(ALLREDUCE, [[a1, b1]])] == ["A", "B"]
    assert [len(row) for row in bind_collective(ALLREDUCE, [[a1], [b1]])] == [1, 1]


class RaysOp(IntEnum):
    """An enumeration as Ray has it."""

    SUM = 0
    PRODUCT = 1
    MAX = 2
    MIN = 3


@pytest.mark.parametrize("op", [ReduceOp.MAX, "max", "MAX", RaysOp.MAX])
def test_a_reduction_by_member_or_by_name(op: Any) -> None:
    output, _ = bind_collective(ALLREDUCE, [call(A, "grad"), call(B, "grad")], op=op)
    assert output.parent.op is ReduceOp.MAX


def test_one_value_of_several_and_an_output_of_a_collective_may_be_reduced() -> None:
    first, _ = call(A, "two", InputNode())
    outputs = bind_collective(ALLREDUCE, [first, call(B, "grad")])
    again = bind_collective(ALLREDUCE, outputs)
    assert [collective.kind for collective in checked(*again).collectives] == [ALLREDUCE] * 2


def bad_binds() -> dict[str, tuple[Any, dict[str, Any], str]]:
    inp = InputNode()
    a, a2, b, b2 = call(A, "grad", inp), call(A, "work", 1), call(B, "grad", inp), call(B, "work", 1)
    return {
        "one actor twice": ([a, a2, b], {}, "A.grad(inp) and A.work(1) are both on the actor A"),
        "no node": ([], {}, "given no nodes"),
        "the input": ([a, inp], {}, "inp, the driver's input"),
        "a part of it": ([a, inp.x], {}, "inp.x, the driver's input"),
        "a number": ([a, 3], {}, "a int and no node"),
        "an actor": ([a, B], {}, "the actor B, which brings no tensor"),
        "no list": (a, {}, "given a MethodNode, no list"),
        "lengths of buckets": ([[a, a2], [b]], {}, "A.grad(inp) has 2 nodes, that of B.grad(inp) (item 1) has 1"),
        "orders of actors": ([[a, b], [b2, a2]], {}, "A.grad(inp), B.work(1), on different actors"),
        "an empty bucket": ([[a], []], {}, "item 1 is an empty list"),
        "a node among lists": ([[a], b], {}, "item 1 is B.grad(inp)"),
        "one actor in two buckets": ([[a], [a2], [b]], {}, "A.grad(inp), A.work(1), B.grad(inp), on different actors"),
        "all outputs": ([MultiOutputNode([a]), b], {}, "a MultiOutputNode"),
    }


@pytest.mark.parametrize("name", sorted(bad_binds()))
def test_mistakes_name_the_node_and_end_in_a_hint(name: str) -> None:
    nodes, options, problem = bad_binds()[name]
    with pytest.raises(GraphError) as caught:
        bind_collective(ALLREDUCE, nodes, **options)
    assert problem in str(caught.value)
    assert caught.value.hint
    assert str(caught.value).startswith("allreduce.bind")


@pytest.mark.parametrize("kind", CollectiveKind)
@pytest.mark.parametrize("overlap", [False, True])
def test_one_actor_is_enough(kind: CollectiveKind, overlap: bool) -> None:
    (output,) = bind_collective(kind, [call(A, "grad", InputNode())])
    plan = compiled(call(B, "step", output), overlap=overlap)
    assert plan.collectives[0].parties == ("A",)
    assert find_fault(plan) is None
    assert explore(plan).verdict == "ok"
    assert simulate(plan, Workload(default_value_bytes=4_000), CostModel(), 2).makespan_us > 0


def test_buckets_of_one_actor() -> None:
    first, second = call(A, "grad", InputNode()), call(A, "work", 1)
    for given_nodes in ([[first, second]], [[first], [second]]):
        (row,) = bind_collective(ALLREDUCE, given_nodes)
        assert [output.parent.members for output in row] == [((first, second),)] * 2
    assert [len(row) for row in bind_collective(ALLREDUCE, [[first]])] == [1]


@pytest.mark.parametrize("kind", [ALLGATHER, REDUCESCATTER, BROADCAST])
def test_only_allreduce_takes_buckets(kind: CollectiveKind) -> None:
    with pytest.raises(GraphError, match="only allreduce"):
        bind_collective(kind, [[call(A, "grad")], [call(B, "grad")]])


@pytest.mark.parametrize("op", ["sumt", 7, None])
def test_an_unknown_reduction(op: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)there is no reduction.*hint: .*SUM, PRODUCT, MIN, MAX, AVG"):
        bind_collective(ALLREDUCE, [call(A, "grad"), call(B, "grad")], op=op)


@pytest.mark.parametrize("transport", ["staged", "shm", "glue"])
def test_an_unknown_transport(transport: str) -> None:
    with pytest.raises(UnknownTransport, match=r"(?s)allreduce.bind asks.*hint: .*auto, gloo"):
        bind_collective(ALLREDUCE, [call(A, "grad"), call(B, "grad")], transport=transport)
    with pytest.raises(TypeError, match="hint"):
        bind_collective(ALLREDUCE, [call(A, "grad"), call(B, "grad")], transport=object())


@pytest.mark.parametrize("root", [2, -1, True, "A"])
def test_a_root_is_a_position(root: Any) -> None:
    with pytest.raises(GraphError, match="root is the position"):
        bind_collective(BROADCAST, [call(A, "grad"), B], root=root)


def test_an_actor_of_another_session_is_found_when_compiled() -> None:
    outputs = bind_collective(BROADCAST, [call(A, "grad"), actor("Z", session="other")])
    with pytest.raises(GraphError, match="Z belongs to another session"):
        checked(*outputs)


def test_a_forgotten_collective_is_found_and_a_dropped_one_is_not() -> None:
    grads = [call(each, "grad") for each in (A, B)]
    outputs = bind_collective(ALLREDUCE, grads)
    with pytest.raises(GraphError, match=r"nothing uses allreduce\(A, B\)"):
        checked(*grads)
    assert checked(outputs[0], *grads).collectives  # one of its values is enough
    del outputs
    assert not checked(*grads).collectives


# Plans


@pytest.mark.parametrize(("name", "overlap"), [("trainers_plain", False), ("trainers_overlap", True)])
def test_golden_plans(name: str, overlap: bool) -> None:
    file = GOLDEN / f"{name}.txt"
    plan = compiled(*trainers(), overlap=overlap)
    assert str(plan).rstrip() == file.read_text().rstrip()
    assert parse_plan(file.read_text()) == plan


def test_overlap_starts_a_collective_after_its_inputs_and_waits_at_its_first_use() -> None:
    plain, overlapped = compiled(*trainers()), compiled(*trainers(), overlap=True)
    assert all(a.stream == MAIN for actions in plain.programs.values() for a in actions if a.verb is Verb.COLL)
    steps = [str(action) for action in overlapped.programs["A"]]
    assert steps.index(f"coll c0 @{COLL_STREAM}") == steps.index("run n0") + 1
    assert steps.index("run n2") < steps.index("run n4")
    assert explore(plain).verdict == explore(overlapped).verdict == "ok"


def test_overlap_lets_what_goes_to_others_wait_behind_work() -> None:
    inp = InputNode()
    outputs = bind_collective(ALLREDUCE, [call(each, "grad", inp) for each in (A, B)])
    plan = compiled(*outputs, call(A, "work", inp), call(A, "work", call(B, "work", inp)), overlap=True)
    steps = [str(action) for action in plan.programs["A"]]
    assert steps.index("run n2") < steps.index("write c0.0")
    assert steps.index("write c0.0") < steps.index("read n3"), "it does not go past what may wait"


def test_unused_values_are_let_go_at_the_end_only() -> None:
    inp = InputNode()
    outputs = bind_collective(ALLREDUCE, [call(each, "grad", inp) for each in (A, B)])
    plan = compiled(outputs[0], call(B, "work", inp), overlap=True)
    assert [str(action) for action in plan.programs["B"]][-2:] == ["free c0.1", "free n2"]


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """On three actors, most values and collectives over gloo."""
    return draw_collectives(draw, (A, B, C), 4, edges=("auto", "gloo"))


@given(outputs=graphs(), overlap=st.booleans(), max_inflight=st.integers(1, 2))
def test_pl1_to_pl4_every_plan_with_collectives_is_sound(outputs: list[Node], overlap: bool, max_inflight: int) -> None:
    plan = compiled(*outputs, overlap=overlap, max_inflight=max_inflight)
    assert find_fault(plan) is None
    try:
        assert explore(plan, most_states=20_000).verdict == "ok"
    except OverflowError:
        return  # too many interleavings to try; the validator has looked at it


# Time


def test_the_simulator_hides_a_collective_behind_work() -> None:
    workload = Workload(compute_us={"work": 5_000.0, "grad": 100.0, "step": 100.0}, default_value_bytes=4_000_000)
    costs = CostModel(num_cores=8)
    plain, overlapped = (simulate(compiled(*trainers(), overlap=overlap), workload, costs) for overlap in (False, True))
    expected_us = costs.collective_time_us(ALLREDUCE, 2, 4_000_000)
    spans = [span for span in overlapped.spans if span.stream == COLL_STREAM]
    assert [span.actor for span in spans] == ["A", "B"]
    assert all(span.end_us - span.start_us == pytest.approx(expected_us) for span in spans)
    assert plain.makespan_us - overlapped.makespan_us == pytest.approx(expected_us, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "share"), [(ALLREDUCE, 1.5), (REDUCESCATTER, 1.5), (ALLGATHER, 3.0), (BROADCAST, 1.0)]
)
def test_the_cost_of_a_collective_of_four(kind: CollectiveKind, share: float) -> None:
    costs = CostModel(gbs=2.0, collective_us=10.0)
    assert costs.collective_time_us(kind, 4, 4_000) == pytest.approx(10.0 + share * 2.0)


# Pictures and names


def test_drawings_show_a_collective_as_one_box() -> None:
    graph = checked(*trainers())
    assert to_ascii(graph).count("allreduce(sum)") == 1
    assert 'c0 [label="c0 allreduce(sum)"' in to_dot(graph)
    assert "c0 -> n4" in to_dot(graph)
    assert "allreduce(sum)" in to_svg(graph)


def test_both_import_paths_are_the_same_and_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import crossfade\n"
        "from crossfade.experimental import collective\n"
        "from crossfade.collective import allgather\n"
        "assert crossfade.collective.allgather is collective.allgather is allgather\n"
        "assert set(collective.__all__) == set(crossfade.collective.__all__)\n"
        "assert 'collective' in dir(crossfade)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_public_names() -> None:
    assert set(crossfade.collective.__all__) == {"ReduceOp", "allgather", "allreduce", "broadcast", "reducescatter"}
    for name in crossfade.collective.__all__:
        assert type(getattr(crossfade.collective, name)).__doc__


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("nccl", "accelerator"),
        (Transport.NCCL, "nccl"),
        ("copy", "copy"),
        (TorchTensorType("nccl"), "accelerator"),
        (TorchTensorType(TorchTensorType.CPU), "gloo"),
        (TorchTensorType(Transport.NCCL, _static_shape=True), "nccl"),
    ],
)
def test_rays_name_of_any_device_transport(asked: Any, taken: str) -> None:
    output, _ = bind_collective(ALLREDUCE, [call(A, "grad"), call(B, "grad")], transport=asked)
    assert output.parent._transport == taken
