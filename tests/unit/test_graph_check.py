"""check: each mistake is found, names the node and ends in a hint; a sound graph comes back sorted and whole."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.errors import GraphError, UnknownTransport
from crossfade.graph.check import CheckedGraph, check
from crossfade.graph.nodes import ActorInfo, InputNode, MethodNode, MultiOutputNode, Node, OutputNode, bind

TRANSPORTS = ("auto", "shm", "gloo")
METHODS = {"forward": 1, "backward": 1, "split": 2}
ACTORS = [ActorInfo(f"Worker{index}", "Worker", "s", METHODS) for index in range(4)]


def call(index: int, *args: Any, **kwargs: Any) -> MethodNode:
    node = bind(ACTORS[index], "forward", args, kwargs)
    assert isinstance(node, MethodNode)
    return node


def split(index: int, *args: Any) -> tuple[OutputNode, ...]:
    nodes = bind(ACTORS[index], "split", args, {})
    assert isinstance(nodes, tuple)
    return nodes


def checked(output: Any) -> CheckedGraph:
    return check(output, session="s", transports=TRANSPORTS)


def mistake(output: Any, pattern: str, kind: type[GraphError] = GraphError) -> str:
    """The hint of the mistake that is found; its message matches the pattern."""
    with pytest.raises(kind) as caught:
        checked(output)
    message = str(caught.value)
    assert re.search(pattern, message), message
    assert caught.value.hint
    assert message.splitlines()[-1] == f"hint: {caught.value.hint}"
    return caught.value.hint


# Sound graphs


def test_one_call() -> None:
    inp = InputNode()
    node = call(0, inp)
    assert checked(node) == CheckedGraph(inp, (inp,), (node,), (node,), False)
    assert checked(MultiOutputNode([node])) == CheckedGraph(inp, (inp,), (node,), (node,), True)


def test_a_graph_without_input() -> None:
    node = call(0, 1, 2)
    assert checked(node) == CheckedGraph(None, (), (node,), (node,), False)


def test_whole_and_parts_may_mix_and_only_what_is_used_counts() -> None:
    inp = InputNode()
    first, second = inp.x, inp[0]
    a = call(0, second, [first])
    b = call(1, a, {"k": inp})
    graph = checked(b)
    assert graph.input is inp
    assert graph.input_parts == (inp, first, second)
    assert graph.methods == (a, b)
    alone = InputNode()
    assert checked(call(0, alone.x)).input_parts == (alone.x,)


def test_several_returns_of_which_one_is_used() -> None:
    inp = InputNode()
    first, _ = split(0, inp)
    node = call(1, first)
    graph = checked(node)
    assert graph.methods == (first.parent, node)
    assert checked(MultiOutputNode([first, node, first])).outputs == (first, node, first)


def test_an_actor_may_be_met_again_and_a_graph_checked_again() -> None:
    inp = InputNode()
    node = call(0, call(1, call(0, inp)))
    assert checked(node) == checked(node)
    assert [each.label for each in checked(node).methods] == ["Worker0.forward", "Worker1.forward", "Worker0.forward"]


# Outputs


@pytest.mark.parametrize(
    ("output", "pattern"),
    [
        (None, "not from a NoneType"),
        (3, "not from an int"),
        ("dag", "not from a str"),
        (InputNode(), "the output is inp, a part of the input"),
        (InputNode().x, r"the output is inp\.x"),
        (MultiOutputNode([]), "has no outputs"),
        (MultiOutputNode([call(0), InputNode()[0]]), r"output 1 of MultiOutputNode is inp\[0\]"),
        (MultiOutputNode([call(0), 5]), "output 1 of MultiOutputNode is an int and no node"),  # type: ignore[list-item]
        (MultiOutputNode([MultiOutputNode([call(0)])]), "output 0 of MultiOutputNode is a MultiOutputNode itself"),
        (split(0)[0].parent, r"the output is Worker0.split\(\), which returns 2 values"),
        (MultiOutputNode([split(0, 1)[0].parent]), r"output 0 .* is Worker0.split\(1\), which returns 2"),
    ],
)
def test_what_can_be_no_output(output: Any, pattern: str) -> None:
    mistake(output, pattern)


def test_a_list_of_nodes_and_a_nested_tuple() -> None:
    assert "MultiOutputNode([...])" in mistake([call(0)], "not from a list")
    assert "MultiOutputNode([...])" in mistake(split(0), "not from a tuple")
    assert "unpack" in mistake(MultiOutputNode([split(0)]), "output 0 .* a tuple of 2 nodes")  # type: ignore[list-item]


# The input


def test_two_inputs() -> None:
    inp, other = InputNode(), InputNode()
    assert "one InputNode" in mistake(
        call(1, call(0, inp.x, 7), other),
        r"2 InputNodes: Worker0.forward\(inp\.x, 7\) uses one, Worker1.forward\(Worker0.forward, inp\) another",
    )


@pytest.mark.parametrize("ask", [lambda inp: inp.y, lambda inp: inp[3], lambda inp: inp["a b"]])
def test_a_part_that_nobody_uses(ask: Any) -> None:
    inp = InputNode()
    node = call(0, inp.x)
    assert checked(node).methods == (node,)
    part = ask(inp)
    mistake(node, re.escape(f"inp{part._key} was asked for, but no method uses it"))


# Calls that nothing uses


def test_a_leaf_that_is_no_output() -> None:
    inp = InputNode()
    first = call(0, inp)
    second = call(1, first)
    forgotten = call(2, first, "extra")
    assert "MultiOutputNode" in mistake(second, r"nothing uses Worker2.forward\(Worker0.forward, 'extra'\)")
    assert checked(MultiOutputNode([second, forgotten])).outputs == (second, forgotten)
    del forgotten
    assert checked(second).methods == (first, second)


def test_the_end_of_a_forgotten_chain_is_named() -> None:
    inp = InputNode()
    node = call(0, inp)
    end = call(3, split(2, call(1, inp.x))[1])
    mistake(node, r"nothing uses Worker3.forward\(Worker2.split\[1\]\), and")
    assert checked(MultiOutputNode([node, end])).returns_list


def test_several_returns_that_nothing_uses() -> None:
    inp = InputNode()
    node = call(0, inp)
    values = split(1, inp)
    mistake(node, r"nothing uses Worker1.split\(inp\)")
    del values  # it and its call refer to each other: only the collector of cycles finds them
    assert checked(node).methods == (node,)


def test_a_kept_error_keeps_nothing_alive() -> None:
    inp = InputNode()
    node = call(0, inp)
    forgotten = call(1, inp)
    with pytest.raises(GraphError, match="nothing uses") as caught:
        checked(node)
    del forgotten
    assert checked(node).methods == (node,)
    assert caught.value.__traceback__ is not None


# Arguments, actors, transports


def test_arguments_that_are_no_values() -> None:
    both = MultiOutputNode([call(0)])
    assert "list of its nodes" in mistake(call(1, [both]), r"Worker1.forward\(\[MultiOutputNode\]\) takes a Multi")
    assert "tuple of nodes" in mistake(call(1, split(0)[0].parent), "takes all of Worker0.split")


def test_actors() -> None:
    foreign = ActorInfo("Worker9", "Trainer", "another", METHODS)
    node = bind(foreign, "forward", (), {})
    assert "Trainer.remote" in mistake(node, "Worker9.forward runs on another driver's actor")
    with pytest.raises(GraphError, match="another driver's actor"):
        check(call(0), session="", transports=TRANSPORTS)
    mistake(bind(ActorInfo("driver", "Worker", "s", METHODS), "forward", (), {}), "an actor named 'driver'")
    mistyped = MethodNode(ACTORS[0], "forwrad", (1,), {})
    assert "did you mean 'forward'?" in mistake(mistyped, r"Worker0.forwrad\(1\) cannot run: .* no method 'forwrad'")


@pytest.mark.parametrize(("asked", "meant"), [("gluo", "gloo"), ("SHM", "shm"), ("Auto", "auto")])
def test_a_transport_that_does_not_exist(asked: str, meant: str) -> None:
    node = call(0, 1).with_tensor_transport(asked)
    hint = mistake(call(1, node), rf"Worker0.forward\(1\) asks for the transport '{asked}'", UnknownTransport)
    assert hint == f"did you mean '{meant}'? the transports are auto, gloo, shm"


def test_the_gpus_of_those_who_take_part_come_along() -> None:
    methods = {"forward": 1}
    first, second, third = (
        ActorInfo(f"A{index}", "A", "s", methods, gpus=gpus) for index, gpus in enumerate(((1, 0), (), (2,)))
    )
    made = bind(first, "forward", (), {})
    assert checked(bind(second, "forward", (made,), {})).devices == {"A0": (1, 0)}
    assert checked(bind(third, "forward", (made,), {})).devices == {"A0": (1, 0), "A2": (2,)}


def test_the_transport_of_one_value_of_several() -> None:
    first, second = split(0)
    second.with_tensor_transport("carrier pigeon")
    assert checked(call(1, first)).outputs
    mistake(call(1, second), r"Worker0.split\(\)\[1\] asks for the transport 'carrier pigeon'", UnknownTransport)


# Any graph


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[MethodNode], list[Node], InputNode]:
    """Method calls, the values they give, the input; some of the values may be used by nothing."""
    inp = InputNode()
    values: list[Node] = []
    calls: list[MethodNode] = []
    for _ in range(draw(st.integers(1, 15))):
        few = draw(st.lists(st.sampled_from([*values, inp, "part", 0]), max_size=4))
        args = [inp[draw(st.integers(0, 2))] if each == "part" else each for each in few]
        made = bind(ACTORS[draw(st.integers(0, 3))], draw(st.sampled_from(["forward", "split"])), (args,), {})
        calls.append(made[0].parent if isinstance(made, tuple) else made)
        values += made if isinstance(made, tuple) else [made]
    return calls, values, inp


def ends_of(calls: list[MethodNode]) -> list[Node]:
    """One value of each call that no other call uses."""
    ends = [node for node in calls if not any(value._users for value in node.outputs or (node,))]
    return [node.outputs[-1] if node.outputs else node for node in ends]


@given(graphs())
def test_a_sound_graph_comes_back_sorted_and_whole(graph: tuple[list[MethodNode], list[Node], InputNode]) -> None:
    calls, values, inp = graph
    result = checked(MultiOutputNode(ends_of(calls)))
    assert list(result.methods) == calls
    position = {node: index for index, node in enumerate(calls)}
    for node in calls:
        for source in node.inputs:
            maker = source.parent if isinstance(source, OutputNode) else source
            assert maker in result.input_parts if maker not in position else position[maker] < position[node]
    used = {source for node in calls for source in node.inputs}
    assert set(result.input_parts) == used - set(values)
    assert [part._order for part in result.input_parts] == sorted(part._order for part in result.input_parts)
    assert (result.input is inp) == bool(result.input_parts)


@settings(max_examples=30)
@given(graphs(), st.data())
def test_one_end_left_out_is_found_if_it_hangs_on_the_rest(
    graph: tuple[list[MethodNode], list[Node], InputNode], data: st.DataObject
) -> None:
    calls, _, inp = graph
    ends = ends_of(calls)
    left_out = data.draw(st.sampled_from(ends))
    kept = [node for node in ends if node is not left_out]
    if not kept:
        return
    reached = connected_downwards(calls, kept, inp)
    maker = left_out.parent if isinstance(left_out, OutputNode) else left_out
    if maker in reached:
        with pytest.raises(GraphError, match="nothing uses Worker"):
            checked(MultiOutputNode(kept))
    else:
        assert maker not in checked(MultiOutputNode(kept)).methods


def connected_downwards(calls: list[MethodNode], outputs: list[Node], inp: InputNode) -> set[Node]:
    """The plain reference: what the outputs need, and everything that is made from that, by repeated sweeps."""
    reached: set[Node] = set(outputs)
    for node in reversed(calls):
        if node in reached or any(value in reached for value in node.outputs):
            reached |= {node, *node.inputs, *node.outputs}
    if any(part in reached for part in (inp, *inp._parts.values())):
        reached |= {inp, *inp._parts.values()}
    for node in calls:
        if any(source in reached for source in node.inputs):
            reached |= {node, *node.outputs}
    return reached


def test_ten_thousand_calls() -> None:
    inp = InputNode()
    node = call(0, inp)
    for index in range(10_000):
        node = call(index % 4, node, inp)
    start_s = time.process_time()
    graph = checked(node)
    assert time.process_time() - start_s < 2
    assert len(graph.methods) == 10_001


def test_a_transport_to_an_actor_that_does_not_read() -> None:
    node = call(0, 1).with_tensor_transport("gloo", reader=ACTORS[1])
    hint = mistake(call(0, node), "asks for a transport to Worker1, which does not read it")
    assert hint == "it is read by Worker0"


def test_a_transport_of_the_input_to_who_reads_a_part_of_it() -> None:
    inp = InputNode().with_tensor_transport(device="cuda", reader=ACTORS[1])
    assert checked(call(1, inp.x)).outputs
    hint = mistake(call(0, inp[0]), "inp asks for a transport to Worker1, which does not read it")
    assert hint == "it is read by Worker0"


def test_a_transport_to_what_is_no_actor() -> None:
    with pytest.raises(TypeError, match=r"'Worker1' is no actor\nhint: pass the handle"):
        call(0, 1).with_tensor_transport("gloo", reader="Worker1")


def test_an_unknown_transport_to_one_reader() -> None:
    node = call(0, 1).with_tensor_transport("glop", reader=ACTORS[1])
    mistake(call(1, node), "asks for the transport 'glop'", UnknownTransport)
