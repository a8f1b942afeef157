"""The input of a graph and its parts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest

from crossfade.errors import GraphError
from crossfade.graph.nodes import InputNode, bind, describe
from tests.helpers.bound_nodes import ACTOR


def test_a_part_asked_for_twice_is_the_same_node() -> None:
    inp = InputNode()
    assert inp.x is inp.x
    assert inp[0] is inp[0]
    assert inp["x"] is inp["x"]
    assert len({inp.x, inp["x"], inp[0], inp[-1]}) == 4
    assert tuple(inp._parts.values()) == (inp.x, inp[0], inp["x"], inp[-1])


def test_keys_say_which_part_it_is() -> None:
    with InputNode() as inp:
        keys = [inp._key, inp[0]._key, inp[-2]._key, inp["x"]._key, inp['a "b" \n é']._key, inp.x._key]
    assert keys == ["*", "[0]", "[-2]", '["x"]', '["a \\"b\\" \\n \\u00e9"]', ".x"]


def test_every_name_that_is_no_method_is_a_part() -> None:
    inp = InputNode()
    for name in (
        "order",
        "users",
        "transport",
        "target_device",
        "static_shape",
        "direct_return",
        "key",
        "parent",
        "parts",
    ):
        assert describe(getattr(inp, name)) == f"inp.{name}"


@pytest.mark.parametrize("name", ["compile", "experimental_compile", "with_tensor_transport", "with_type_hint"])
def test_a_method_of_nodes_is_no_argument(name: str) -> None:
    inp = InputNode()
    with pytest.raises(GraphError, match=rf'(?s)inp\.{name}, which is a method of nodes.*hint: .* inp\["{name}"\]'):
        bind(ACTOR, "forward", ([getattr(inp, name)],), {})


@pytest.mark.parametrize("item", [slice(0, 2), 1.5, None, True, (0, 1)])
def test_other_items_are_refused(item: Any) -> None:
    inp = InputNode()
    with pytest.raises(TypeError, match="hint:"):
        inp[item]
    assert not inp._parts


def test_probing_makes_no_parts() -> None:
    inp = InputNode()
    for name in ("__array__", "__deepcopy__", "_repr_html_", "__wrapped__", "__len__"):
        assert not hasattr(inp, name)
    with pytest.raises(TypeError):
        copy.copy(inp)
    with pytest.raises(TypeError):
        copy.deepcopy(inp)
    inspect.unwrap(cast(Any, inp))
    repr(inp)
    assert not inp._parts


@pytest.mark.parametrize(
    "ask", [lambda part: part.y, lambda part: part.get("y"), lambda part: part["y"], lambda part: part[0]]
)
def test_parts_of_parts_are_refused(ask: Callable[[Any], object]) -> None:
    for part, label in ((InputNode().x, r"inp\.x"), (InputNode()[0], r"inp\[0\]")):
        with pytest.raises(
            (AttributeError, TypeError), match=rf"^{label}.*\nhint: bind {label}, and take parts of it in the method"
        ):
            ask(part)
        assert not hasattr(part, "_y")
