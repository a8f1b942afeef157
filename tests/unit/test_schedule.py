"""The passes: what plans come out of graphs, golden ones to the letter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.graph.check import check
from crossfade.graph.nodes import InputNode, MultiOutputNode, Node
from crossfade.plan.actions import SEND_STREAM, Verb
from crossfade.plan.call import Call, Hole
from crossfade.plan.parse import parse_plan
from crossfade.plan.plan import Plan
from crossfade.plan.validate import find_fault
from crossfade.schedule.compile import compile_plan
from crossfade.types import DRIVER, Transport
from tests.helpers.explore import explore
from tests.helpers.small_graphs import actor, call

GOLDEN = Path(__file__).parent.parent / "golden"
TRANSPORTS = ("auto", "shm", "gloo")


def _compile(output: Node | MultiOutputNode, **options: Any) -> tuple[Plan, dict[str, Call]]:
    checked = check(output, session="s", transports=TRANSPORTS)
    return compile_plan(checked, **{"max_inflight": 3, **options})


def fan_in(transport: str) -> Node:
    """Three senders and a receiver that takes their values one after another."""
    inp = InputNode()
    made = [call(actor(f"Sender{i}"), "make", inp) for i in range(3)]
    state: Any = 0
    for value in made:
        state = call(actor("Receiver"), "take", state, value.with_tensor_transport(transport))
    return state  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "transport", "overlap"),
    [("fan_in_shm", "shm", True), ("fan_in_gloo_overlap", "gloo", True), ("fan_in_gloo_plain", "gloo", False)],
)
def test_golden_plans(name: str, transport: str, overlap: bool) -> None:
    plan, _ = _compile(fan_in(transport), overlap=overlap)
    file = GOLDEN / f"{name}.txt"
    assert str(plan).rstrip() == file.read_text().rstrip()
    assert parse_plan(file.read_text()) == plan


def test_pl1_receives_come_in_the_order_of_the_sends() -> None:
    a, b = actor("A"), actor("B")
    inp = InputNode()
    first = call(a, "make", inp).with_tensor_transport("gloo")
    second = call(a, "make", first).with_tensor_transport("gloo")
    last = call(b, "take", call(b, "take", second), first)  # B needs the second value first
    for overlap in (False, True):
        plan, _ = _compile(last, overlap=overlap)
        order = [action.target for action in plan.programs["B"] if action.verb is Verb.RECV]
        assert order == [action.target for action in plan.programs["A"] if action.verb is Verb.SEND]


def test_pl2_sends_that_would_wait_for_themselves_trail() -> None:
    a, b = actor("A"), actor("B")
    inp = InputNode()
    early = call(a, "make", inp).with_tensor_transport("gloo")
    other = call(a, "make", inp).with_tensor_transport("gloo")
    middle = call(b, "take", other)  # B asks for `other` before it asks for `early`
    back = call(a, "take", middle.with_tensor_transport("gloo"))
    plan, _ = _compile(MultiOutputNode([call(b, "take", early, middle), back]), overlap=False)
    assert find_fault(plan) is None


def test_an_actor_without_input_waits_for_the_start() -> None:
    a, b = actor("A"), actor("B")
    plan, _ = _compile(call(b, "take", call(a, "make", 1)))
    assert [spec.key for spec in plan.inputs] == ["go"]
    assert str(plan.programs["A"][0]) == "read i0"
    assert plan.channel["i0"].readers == ("A",)


def test_one_channel_for_all_readers_of_a_value() -> None:
    a, readers = actor("A"), [actor(f"R{i}") for i in range(3)]
    made = call(a, "make", InputNode())
    plan, _ = _compile(MultiOutputNode([*(call(reader, "take", made) for reader in readers), made]))
    assert plan.channel["n0"].readers == ("R0", "R1", "R2", DRIVER)
    assert plan.outputs == ("n1", "n2", "n3", "n0")


def test_a_value_leaves_by_two_transports() -> None:
    a, b = actor("A"), actor("B")
    made = call(a, "make", InputNode()).with_tensor_transport("gloo")
    plan, _ = _compile(MultiOutputNode([made, call(b, "take", made)]))
    assert {spec.id: spec.transport for spec in plan.channels if spec.value == "n0"} == {
        "n0": Transport.GLOO,
        "n0~shm": Transport.SHM,
    }


def test_each_reader_may_have_a_transport_of_its_own() -> None:
    a, b, c, d = map(actor, "ABCD")
    first, second = call(a, "split", InputNode(), num_returns=2)
    first.parent.with_tensor_transport("gloo", reader=b)
    second.with_tensor_transport("gloo").with_tensor_transport("shm", reader=c)
    plan, _ = _compile(MultiOutputNode([call(reader, "take", first, second) for reader in (b, c, d)]))
    ways = {
        (spec.value, reader): spec.transport for spec in plan.channels for reader in spec.readers if spec.writer == "A"
    }
    shm, gloo = Transport.SHM, Transport.GLOO
    assert [ways["n0.0", reader] for reader in "BCD"] == [gloo, shm, shm]
    assert [ways["n0.1", reader] for reader in "BCD"] == [gloo, shm, gloo]


def test_holes_stand_where_the_nodes_were() -> None:
    a = actor("A")
    inp = InputNode()
    low, high = call(a, "split", inp.x)
    node = call(a, "take", low, [high, {"k": (low, 7)}], named={"x": inp[0]})
    plan, calls = _compile(node)
    assert plan.node["n1"].inputs == ("n0.0", "n0.1", "i1")
    assert calls["n1"] == Call((Hole(0), [Hole(1), {"k": (Hole(0), 7)}]), {"named": {"x": Hole(2)}})
    assert [spec.key for spec in plan.inputs] == [".x", "[0]"]


@st.composite
def outputs(draw: st.DrawFn) -> MultiOutputNode:
    """A random graph over a few actors, with random wishes."""
    actors = [actor(f"A{i}") for i in range(draw(st.integers(1, 3)))]
    inp = InputNode()
    values: list[Node] = [inp]
    users: set[Node] = set()
    for index in range(draw(st.integers(1, 5))):
        taken: Sequence[Node] = draw(st.lists(st.sampled_from(values), max_size=3)) if index else [inp]
        users.update(taken)
        made = call(draw(st.sampled_from(actors)), draw(st.sampled_from(("make", "split"))), *taken)
        nodes = list(made) if isinstance(made, tuple) else [made]
        values += [node.with_tensor_transport(draw(st.sampled_from(TRANSPORTS))) for node in nodes]
    return MultiOutputNode([value for value in values[1:] if value not in users])


@given(output=outputs(), overlap=st.booleans(), max_inflight=st.integers(1, 2))
def test_every_plan_is_sound_by_the_exhaustive_search_too(
    output: MultiOutputNode, overlap: bool, max_inflight: int
) -> None:
    plan, _ = _compile(output, overlap=overlap, max_inflight=max_inflight)
    assert parse_plan(str(plan)) == plan
    assert explore(plan).verdict == "ok"


@given(output=outputs())
def test_overlap_changes_no_node_and_no_value(output: MultiOutputNode) -> None:
    plain, plain_calls = _compile(output, overlap=False)
    overlapped, calls = _compile(output, overlap=True)
    assert (plain.nodes, plain.channels, plain.outputs, plain_calls) == (
        overlapped.nodes,
        overlapped.channels,
        overlapped.outputs,
        calls,
    )
    for party, actions in plain.programs.items():
        assert _skeleton(actions) == _skeleton(overlapped.programs[party])
    for actions in overlapped.programs.values():
        assert all(action.stream == SEND_STREAM for action in actions if action.verb is Verb.SEND)


def _skeleton(actions: Sequence[Any]) -> list[tuple[Verb, str]]:
    """What a program does, without the receives that overlap moves."""
    return [(action.verb, action.target) for action in actions if action.verb is not Verb.RECV]


def test_a_graph_of_ten_thousand_nodes() -> None:
    actors = [actor(f"A{i}") for i in range(4)]
    value: Any = InputNode()
    for index in range(10_000):
        value = call(actors[index % 4], "make", value)
    plan, _ = _compile(value)
    assert len(plan.nodes) == 10_000
