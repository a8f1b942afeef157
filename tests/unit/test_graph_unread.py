"""Calls that were bound, dropped and read by nothing: no graph that they belong to is compiled without a word."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from crossfade.errors import GraphError, UnknownTransport
from crossfade.graph.check import CheckedGraph, check
from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import InputNode, MethodNode, MultiOutputNode, Node, OutputNode, bind
from crossfade.types import CollectiveKind
from tests.helpers.bound_nodes import ACTOR, OTHER, call
from tests.unit.test_graph_check import connected_downwards, ends_of


def other(*args: Any) -> Any:
    return bind(OTHER, "forward", args, {})


def split(*args: Any) -> tuple[OutputNode, ...]:
    nodes = bind(ACTOR, "split", args, {})
    assert isinstance(nodes, tuple)
    return nodes


def checked(output: Any) -> CheckedGraph:
    return check(output, session="s", transports=("auto", "shm"))


def missed(output: Any, call: str) -> None:
    """An error names the call, and says how it becomes an output."""
    with pytest.raises(GraphError) as caught:
        checked(output)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(f"nothing uses {call}"), caught.value
    assert "no output of the graph" in str(caught.value)
    assert "MultiOutputNode([...])" in (caught.value.hint or "")


# What is found


@pytest.mark.parametrize(
    ("drop", "says"),
    [
        (lambda inp, node: other(inp), "Worker1.forward(inp)"),
        (lambda inp, node: other(inp.x), "Worker1.forward(inp.x)"),
        (lambda inp, node: other([{"k": node}], 3), "Worker1.forward([{'k': Worker0.forward}], 3)"),
        (lambda inp, node: other(call(inp)), "Worker1.forward(Worker0.forward)"),
        (lambda inp, node: other(split(call(inp))[1]), "Worker1.forward(Worker0.split[1])"),
        (lambda inp, node: split(node), "Worker0.split(Worker0.forward)"),
        (
            lambda inp, node: bind_collective(CollectiveKind.ALLREDUCE, [node, other(inp)]),
            "allreduce(Worker0, Worker1)",
        ),
    ],
)
@pytest.mark.parametrize("is_collected", [False, True])
def test_a_dropped_call_is_named(drop: Callable[[Node, Node], object], says: str, is_collected: bool) -> None:
    inp = InputNode()
    node = call(inp)
    drop(inp, node)
    if is_collected:
        gc.collect()
    missed(node, says)


def test_the_first_of_several_is_named_and_the_others_are_counted() -> None:
    inp = InputNode()
    first, second = call(inp), call(inp.x)
    other(first)
    kept = other(second, 1)
    other(second, 2)
    missed(MultiOutputNode([first, second]), "Worker1.forward(Worker0.forward) (nor 2 more calls), and")
    del kept
    assert len(checked(MultiOutputNode([first, second])).methods) == 2


def test_what_was_dropped_after_a_compile_is_missed_by_the_next_one() -> None:
    node = call(InputNode())
    assert checked(node).methods == (node,)
    other(node)
    missed(node, "Worker1.forward(Worker0.forward)")


def test_one_output_of_several_is_enough() -> None:
    inp = InputNode()
    first, second = split(inp)
    node = call(first)
    del second, first
    assert checked(node).methods


def test_the_traces_of_calls_that_go_at_once_are_not_lost() -> None:
    """Their cycles of references are collected together, whichever comes first."""
    inp = InputNode()
    node = call(inp)
    split(split(split(inp)[0])[1])
    gc.collect()
    missed(node, "Worker0.split(Worker0.split[1])")


# How one goes on


def test_the_same_output_is_refused_again_and_one_that_is_bound_after_the_error_is_not() -> None:
    inp = InputNode()
    node = call(inp)
    other(inp)
    for _ in range(2):
        missed(node, "Worker1.forward(inp)")
    assert len(checked(MultiOutputNode([node, other(inp)])).methods) == 2
    assert len(checked(call(inp)).methods) == 1
    other(inp, 2)
    missed(call(inp), "Worker1.forward(inp, 2)")


def test_a_call_that_an_error_has_named_may_be_dropped() -> None:
    inp = InputNode()
    node, kept = call(inp), other(inp)
    missed(node, "Worker1.forward(inp)")
    del kept
    assert checked(node).methods == (node,)


# What is no mistake


def test_a_call_without_nodes_is_in_no_graph() -> None:
    node = call(InputNode())
    other(3)
    other(call(4))
    assert checked(node).methods == (node,)
    constant = call(5)
    other(constant)
    missed(MultiOutputNode([node, constant]), "Worker1.forward(Worker0.forward)")


def test_what_other_graphs_were_made_of_may_be_dropped() -> None:
    inp = InputNode()
    middle = call(inp)
    assert checked(other(middle, split(inp)[0])).methods
    gc.collect()
    assert checked(middle).methods == (middle,)
    ends = MultiOutputNode([other(middle), split(middle)[1]])
    assert checked(middle).methods == (middle,)  # they are to be a graph
    del ends
    gc.collect()
    assert checked(middle).methods == (middle,)


def test_a_node_that_is_kept_from_another_graph_is_used() -> None:
    inp = InputNode()
    middle = call(inp)
    assert checked(other(middle)).methods
    assert checked(call(inp)).methods  # nothing reads `middle` now


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (lambda inp: checked(other(inp).with_tensor_transport("shn")), UnknownTransport),
        (lambda inp: other(inp).compile(5), TypeError),
        (lambda inp: call(other(inp), {inp}), GraphError),
        (lambda inp: call({other(inp)}), GraphError),
        (lambda inp: bind_collective(CollectiveKind.ALLREDUCE, [[other(inp)], call(inp)]), GraphError),
        (lambda inp: bind_collective(CollectiveKind.ALLREDUCE, [other(inp)], op="som"), ValueError),
        (lambda inp: MultiOutputNode(other(inp), call(inp)), GraphError),
        (lambda inp: checked(MultiOutputNode([[other(inp)], call(inp)])), GraphError),  # type: ignore[list-item]
    ],
)
def test_calls_of_which_an_error_was_raised_may_be_bound_again(
    refused: Callable[[Node], object], error: type[Exception]
) -> None:
    inp = InputNode()
    with pytest.raises(error):
        refused(inp)
    gc.collect()
    assert checked(call(inp)).methods


def test_another_input_is_another_graph() -> None:
    other(InputNode())
    inp = InputNode()
    call(inp)
    assert checked(other(InputNode())).methods


# Cost


def test_calls_that_are_dropped_for_ever_leave_one_trace() -> None:
    inp = InputNode()
    node = call(inp)
    for index in range(1_000):
        other(node, inp.x, index)
    assert node._trace is inp._trace is inp.x._trace
    assert node._trace is not None
    assert node._trace.call == "Worker1.forward(Worker0.forward, inp.x, 0)"
    assert not node._users


def test_a_long_chain_is_dropped_without_recursion() -> None:
    inp = InputNode()
    node = call(inp)
    end: Any = inp
    for _ in range(20_000):
        end = other(end)
    start_s = time.process_time()
    del end
    assert time.process_time() - start_s < 2
    missed(node, "Worker1.forward(Worker1.forward)")


def test_nodes_that_are_there_when_python_exits_are_silent() -> None:
    code = (
        "from tests.helpers.bound_nodes import ACTOR, call\n"
        "from crossfade.graph.nodes import InputNode, bind\n"
        "inp = InputNode()\n"
        "node, values = call(inp), bind(ACTOR, 'split', (inp,), {})\n"
        "import crossfade.graph.nodes\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == ""


# Any graph


def random_graph(random: Random) -> tuple[list[MethodNode], InputNode]:
    """Method calls, and the input of most of them. No strategy draws the arguments, since those keep what they drew."""
    inp = InputNode()
    values: list[Any] = []
    calls: list[MethodNode] = []
    for _ in range(random.randint(1, 12)):
        few = random.choices([*values, inp, inp[random.randint(0, 2)], 0], k=random.randint(0, 3))
        values += split(few) if random.random() < 0.3 else (call(few),)
        calls.append(getattr(values[-1], "parent", values[-1]))
    return [*calls, call(*inp._parts.values())], inp


@pytest.mark.parametrize("seed", range(100))
def test_a_dropped_end_is_missed_if_it_hangs_on_the_rest(seed: int) -> None:
    random = Random(seed)
    calls, inp = random_graph(random)
    kept = ends_of(calls)
    left_out = kept.pop(random.randrange(len(kept)))
    if not kept:
        return
    maker = left_out._sources()[0] if isinstance(left_out, OutputNode) else left_out
    is_reached = maker in connected_downwards(calls, kept, inp)
    ghost = weakref.ref(maker)
    del left_out, maker, calls
    if seed % 2:
        gc.collect()
        assert ghost() is None
    output = MultiOutputNode(kept)
    if is_reached:
        missed(output, "Worker")
    else:
        assert checked(output).methods
