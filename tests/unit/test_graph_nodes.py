"""Nodes: what bind keeps, labels, the hook, walking."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import GraphError, SessionError
from crossfade.graph import hook
from crossfade.graph.arguments import MAX_DEPTH
from crossfade.graph.nodes import (
    InputNode,
    InputPart,
    MethodNode,
    MultiOutputNode,
    Node,
    OutputNode,
    bind,
    describe,
    walk,
)
from tests.helpers.bound_nodes import ACTOR, call

# bind


def test_what_is_bound_is_found_at_any_depth_in_order() -> None:
    inp = InputNode()
    first, second = call(inp), call(inp[0])
    node = call(1, [second, {"k": (inp.x, first)}], second, key={"deep": [[inp.x, inp]]})
    assert node.inputs == (second, inp.x, first, inp)
    assert node in first._users
    assert node in second._users
    assert set(inp.x._users) == {node}
    assert set(inp._users) == {first, node}


def test_containers_are_copied_and_leaves_are_not() -> None:
    leaf, inp = object(), InputNode()
    items: list[Any] = [leaf, inp]
    pairs = {"items": items, 3: (items, [])}
    node = call(items, pairs, pairs=pairs)
    items.append("late")
    pairs["late"] = items
    assert node.args == ([leaf, inp], {"items": [leaf, inp], 3: ([leaf, inp], [])})
    assert node.kwargs == {"pairs": {"items": [leaf, inp], 3: ([leaf, inp], [])}}
    assert node.args[0][0] is leaf


class Point(collections.namedtuple("Point", "x y")):
    pass


def test_subclasses_of_containers_are_leaves() -> None:
    for value in (Point(1, 2), collections.OrderedDict(a=1), {1, 2}):
        assert call(value).args[0] is value


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda node: {node: 1}, "as a key of a dict"),
        (lambda node: {node}, "in a set"),
        (lambda node: [frozenset([node])], "in a frozenset"),
        (lambda node: Point(node, 1), "in a Point"),
        (lambda node: {"a": collections.OrderedDict(a=node)}, "in a OrderedDict"),
        (lambda node: collections.OrderedDict({node: 1}), "as a key of a dict"),
    ],
)
def test_a_node_where_it_cannot_be_found_is_refused(wrap: Any, place: str) -> None:
    inp = InputNode()
    with pytest.raises(GraphError, match=f"Worker0.forward is given the node inp.x {place}") as caught:
        call(1, key=wrap(inp.x))
    assert caught.value.hint
    assert not inp.x._users


def test_arguments_that_contain_themselves_are_refused() -> None:
    items: list[Any] = []
    items.append([items])
    with pytest.raises(GraphError, match="contains itself"):
        call(items)
    twice: list[Any] = [1]
    assert call(twice, twice).args == ([1], [1])


def test_arguments_may_be_nested_deeply_but_not_without_end() -> None:
    inp = InputNode()
    deep: Any = inp
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert call(deep).inputs == (inp,)
    with pytest.raises(GraphError, match="deeper"):
        call([deep])


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(AttributeError) as caught:
        bind(ACTOR, "forwrad", (), {})
    message = str(caught.value)
    assert "Worker0" in message
    assert "hint: did you mean 'forward'? Worker0 has forward, backward, split" in message
    assert "_private" not in message
    with pytest.raises(AttributeError, match="hint: Worker0 has forward, backward, split"):
        bind(ACTOR, "zzz", (), {})


def test_several_returns_are_several_nodes() -> None:
    inp = InputNode()
    outputs = bind(ACTOR, "split", (inp,), {})
    assert isinstance(outputs, tuple)
    assert [(type(each), each.index) for each in outputs] == [(OutputNode, 0), (OutputNode, 1)]
    assert outputs[0].parent is outputs[1].parent
    assert outputs[0].parent.outputs == outputs
    assert outputs[0].parent.num_returns == 2
    user = call(outputs)
    assert user.inputs == outputs
    assert set(outputs[1]._users) == {user}


def test_num_returns_can_be_given() -> None:
    three = bind(ACTOR, "forward", (), {}, 3)
    assert isinstance(three, tuple)
    assert len(three) == 3
    assert isinstance(bind(ACTOR, "split", (), {}, 1), MethodNode)
    with pytest.raises(ValueError, match="hint:"):
        bind(ACTOR, "forward", (), {}, 0)


# What a node is


def test_a_node_is_not_iterable() -> None:
    inp = InputNode()
    for node in (inp, inp.x, call(inp)):
        with pytest.raises(TypeError, match="hint: a method that returns several"):
            _, _ = node
        with pytest.raises(TypeError, match="cannot be iterated"):
            list(node)


def test_several_outputs_come_as_a_list() -> None:
    inp = InputNode()
    made: Any = MultiOutputNode
    assert made(node for node in (inp.x, inp.y)).nodes == made((inp.x, inp.y)).nodes
    for wrong, said in (
        ((inp,), "inp"),
        ((5,), "5"),
        ((inp.x, inp.y), "inp.x, inp.y"),
        (([inp.x], None), r"\[.*\], None"),
    ):
        with pytest.raises(
            GraphError, match=rf"^MultiOutputNode is given {said}\nhint: pass a list: MultiOutputNode\("
        ):
            made(*wrong)


def test_options_of_compile_go_by_name() -> None:
    node: Any = call(InputNode())
    for compiled in (node.compile, node.experimental_compile):
        with pytest.raises(
            TypeError, match=r"compile is given 10\nhint: options go by name, such as compile\(max_infl"
        ):
            compiled(10)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_node_cannot_be_pickled_or_copied(copied: Any) -> None:
    inp = InputNode()
    with pytest.raises(TypeError, match=r"Worker0.forward is a node .*\nhint:"):
        copied(call(inp))
    with pytest.raises(TypeError, match="inp is a node"):
        copied(SimpleNamespace(hidden=inp)) if copied is not copy.copy else copied(inp)


def test_nodes_are_equal_by_identity() -> None:
    assert call(1) != call(1)
    assert len({call(1), call(1)}) == 2


def test_users_that_are_dropped_are_gone() -> None:
    inp = InputNode()
    node = call(inp)
    ghost = weakref.ref(node)
    assert len(inp._users) == 1
    del node
    gc.collect()
    assert ghost() is None
    assert not inp._users


class Awkward:
    def __repr__(self) -> str:
        raise RuntimeError("never to be called")


def test_short_and_useful_reprs() -> None:
    inp = InputNode()
    first = call(inp)
    node = call(first, inp[0], 2.5, "text" * 50, Awkward(), [1, 2, {"k": inp["x"]}], scale=(1,), other=None)
    assert repr(first) == "MethodNode(Worker0.forward(inp))"
    assert describe(node) == (
        "Worker0.forward(Worker0.forward, inp[0], 2.5, 'texttexttexttexttexttext'..., ..., scale=(1,), other=None)"
    )
    assert describe(call(Awkward(), [1, 2, {"k": inp["x"]}], 10**5000, [[[1]]])) == (
        "Worker0.forward(<Awkward>, [1, 2, {'k': inp[\"x\"]}], <int>, [[<list>]])"
    )
    second = bind(ACTOR, "split", (inp,), {})
    assert isinstance(second, tuple)
    assert repr(second[1]) == "OutputNode(Worker0.split[1])"
    assert [repr(inp), repr(inp.x)] == ["InputNode()", "InputPart(inp.x)"]
    assert repr(MultiOutputNode([first, inp])) == "MultiOutputNode([Worker0.forward, inp])"
    assert len(repr(call(*range(10_000)))) < 100


def test_what_only_a_compiled_graph_has_is_missing_with_a_hint() -> None:
    parts = bind(ACTOR, "split", (1,), {})
    assert isinstance(parts, tuple)
    nodes: list[Any] = [call(), MultiOutputNode([call()]), parts[0], InputNode().x]
    for node in nodes:
        assert not hasattr(node, "execute")
        with pytest.raises(
            AttributeError, match=r"has no execute\nhint: graph = node\.compile\(\), then graph\.execute"
        ):
            node.execute(1)
        get = (
            "take parts of it"
            if isinstance(node, InputPart)
            else r"graph = .*, then graph\.execute\(\.\.\.\)\.get\(\)$"
        )
        with pytest.raises(AttributeError, match=rf"'?get'?\nhint: .*{get}"):
            node.get()
        name = "inp.x" if isinstance(node, InputPart) else f"'{type(node).__name__}' object"
        with pytest.raises(AttributeError, match=f"{name} has no attribute 'exec'"):
            node.exec(1)


# The hook


def test_compile_calls_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook._Hook, "installed", None)
    node, both = call(), MultiOutputNode([call(), call()])
    with pytest.raises(SessionError, match="hint:"):
        node.compile()
    hook.install_compiler(lambda output, **options: (output, options))
    assert node.compile(overlap=True) == (node, {"overlap": True})
    assert both.experimental_compile(_submit_timeout=3) == (both, {"_submit_timeout": 3})


# walk

plain = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.sampled_from(["node"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers(0, 9), inner, max_size=3),
    ),
    max_leaves=8,
)


def with_nodes(template: Any, nodes: list[Node], picks: Any) -> Any:
    """The template with each "node" replaced by one of the nodes."""
    if template == "node":
        return picks(nodes)
    if isinstance(template, list | tuple):
        return type(template)(with_nodes(item, nodes, picks) for item in template)
    if isinstance(template, dict):
        return {key: with_nodes(item, nodes, picks) for key, item in template.items()}
    return template


def nodes_of(template: Any) -> list[Node]:
    if isinstance(template, Node):
        return [template]
    if isinstance(template, dict):
        template = list(template.values())
    return [node for item in template for node in nodes_of(item)] if isinstance(template, list | tuple) else []


@given(st.lists(plain, min_size=1, max_size=12), st.data())
def test_random_graphs(templates: list[Any], data: st.DataObject) -> None:
    inp = InputNode()
    nodes: list[Node] = [inp, inp.x, inp[0]]
    for template in templates:
        argument = with_nodes(template, nodes, lambda among: data.draw(st.sampled_from(among)))
        before, marks = copy_of(argument), nodes_of(argument)
        made = bind(ACTOR, data.draw(st.sampled_from(["forward", "split"])), (argument,), {"again": argument})
        assert argument == before
        call_node = made[0].parent if isinstance(made, tuple) else made
        assert call_node.args == (before,)
        assert list(call_node.inputs) == list(dict.fromkeys(marks))
        nodes += made if isinstance(made, tuple) else [made]
    chosen = data.draw(st.lists(st.sampled_from(nodes), min_size=1))
    walked = walk(chosen)
    position = {node: index for index, node in enumerate(walked)}
    assert len(position) == len(walked)
    assert set(chosen) <= set(walked)
    for node in walked:
        assert all(position[source] < position[node] for source in node._sources())
    needed = set(chosen) | {source for node in walked for source in node._sources()}
    assert needed == set(walked)


def copy_of(template: Any) -> Any:
    if isinstance(template, list | tuple):
        return type(template)(copy_of(item) for item in template)
    return {key: copy_of(item) for key, item in template.items()} if isinstance(template, dict) else template


def test_a_long_chain_is_walked_without_recursion() -> None:
    inp = InputNode()
    node: Node = inp
    start_s = time.process_time()
    for _ in range(10_000):
        node = call(node)
    walked = walk([MultiOutputNode([node])])
    assert time.process_time() - start_s < 2
    assert len(walked) == 10_002
    assert walked[0] is inp
    assert walked[-2] is node


def test_multi_output_is_walked_to_its_nodes() -> None:
    inp = InputNode()
    node, outputs = call(inp.x), bind(ACTOR, "split", (inp,), {})
    assert isinstance(outputs, tuple)
    both = MultiOutputNode([node, outputs[1]])
    assert walk([both]) == sorted([inp, inp.x, node, outputs[1].parent, outputs[1], both], key=lambda n: n._order)
    assert isinstance(inp.x, InputPart)
