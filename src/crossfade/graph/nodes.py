"""Nodes: what the user says, as data. A node is one value of a graph before the graph is compiled.

::

    Node
    ├── InputNode         the argument of ``execute``
    ├── InputPart         a part of it: ``inp[0]``, ``inp["x"]``, ``inp.x``
    ├── MethodNode        what a method call gives; made by `bind`
    ├── OutputNode        one of the values of a method that returns several
    ├── CollectiveNode    what several actors do together, and CollectiveOutput, what one of them gets (`graph.collectives`)
    └── MultiOutputNode   several values as the output of a graph

A node refers to the nodes that it uses, and these refer weakly to it, so a node that the user drops is freed. If nothing has read a
call by then, it leaves a trace (`graph.unread`).
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from crossfade.errors import GraphError
from crossfade.graph.actors import ActorInfo, unknown_method
from crossfade.graph.arguments import brief, find_hidden, leaves, snapshot
from crossfade.graph.node import OF_GRAPHS, Node
from crossfade.graph.unread import Trace, leave_trace
from crossfade.interrupted import brief as brief_step

__all__ = [
    "ActorInfo",
    "InputNode",
    "InputPart",
    "MethodNode",
    "MultiOutputNode",
    "Node",
    "OutputNode",
    "bind",
    "describe",
    "label_of",
    "leave_if_unread",
    "nodes_in",
    "settle",
    "unknown_method",
    "walk",
]

_MOST_PARTS = 10**18
"""Positions that the text of a plan can have."""


class InputNode(Node):
    """The argument of ``execute``: ``with InputNode() as inp:``, or without ``with``.

    The whole is bound as ``inp``, parts as ``inp[0]``, ``inp["x"]`` and ``inp.x``; whole and parts may mix. A name that is a
    method of nodes (``compile``, ``experimental_compile``, ``with_tensor_transport``, ``with_type_hint``) or that begins with an
    underscore is written ``inp["compile"]``.
    """

    _key = "*"  # the whole

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, InputPart] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __getattr__(self, name: str) -> InputPart:
        if name.startswith("_"):  # asked for by copy, pickle, inspect and their like
            raise AttributeError(f'an InputNode has no attribute {name!r}\nhint: a part of that name is inp["{name}"]')
        if not name.isidentifier():
            raise AttributeError(f"{name!r} is no name of an attribute\nhint: write inp[{name!r}]")
        return self._part(f".{name}")

    def __getitem__(self, item: int | str) -> InputPart:
        if isinstance(item, str):
            return self._part(f"[{json.dumps(item)}]")
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise TypeError(f"inp[{item!r}] is no part of the input\nhint: write inp[0] or inp['x']; slice in a method")
        if abs(operator.index(item)) >= _MOST_PARTS:
            raise ValueError(f"inp[{item}]: no argument has so many parts\nhint: write inp['name'] for a part by name")
        return self._part(f"[{operator.index(item)}]")

    def _part(self, key: str) -> InputPart:
        if key not in self._parts:
            self._parts[key] = InputPart(self, key)
        return self._parts[key]

    def _label(self) -> str:
        return "inp"

    def __repr__(self) -> str:
        return "InputNode()"


class InputPart(Node):
    """A part of the argument of ``execute``."""

    def __init__(self, parent: InputNode, key: str) -> None:
        super().__init__()
        self.parent = parent
        self._key = key  # ``[0]``, ``["x"]`` (a string as in JSON) or ``.x``

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or (name in OF_GRAPHS and name != "get"):  # which is a dict's, of a part
                return super().__getattr__(name)
            raise AttributeError(f"{self._label()} has no attribute {name!r}\nhint: {self._instead()}")

    def __getitem__(self, item: object) -> NoReturn:
        raise TypeError(f"{self._label()}[{item!r}]: a part of the input has no parts\nhint: {self._instead()}")

    def _instead(self) -> str:
        return f"bind {self._label()}, and take parts of it in the method; or give execute each of them as an argument"

    def _sources(self) -> tuple[Node, ...]:
        return (self.parent,)

    def _label(self) -> str:
        return f"inp{self._key}"


class MethodNode(Node):
    """A method call. It is a value itself if the method returns one value, else its ``outputs`` are."""

    inputs: tuple[Node, ...] = ()  # `__del__` needs it even if `__init__` raises early
    outputs: tuple[OutputNode, ...] = ()  # one node for each value of a method that returns several; else empty

    def __init__(
        self, actor: ActorInfo, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_returns: int = 1
    ) -> None:
        super().__init__()
        self.actor = actor
        self.method = method
        self.args: tuple[Any, ...] = snapshot(args)  # the positional arguments as they were when they were bound
        self.kwargs: dict[str, Any] = snapshot(kwargs)  # the keyword arguments likewise
        self.num_returns = num_returns  # how many values the method returns
        found = [*leaves(self.args), *leaves(self.kwargs)]
        _check_hidden(self, found)
        _refuse_nodes_of_ray(found)
        self.inputs = _nodes_among(found)
        if num_returns > 1:
            self.outputs = tuple(OutputNode(self, index) for index in range(num_returns))
        for node in self.inputs:
            node._take_to(self)

    @brief_step
    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():  # the interpreter may have deleted this module's names
            leave_if_unread(self, self.outputs)

    @property
    def label(self) -> str:
        """Actor and method, such as ``Worker0.forward``; not unique if the method is bound more than once."""
        return f"{self.actor.id}.{self.method}"

    def _sources(self) -> tuple[Node, ...]:
        return self.inputs

    def _label(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"MethodNode({describe(self)})"


class OutputNode(Node):
    """One value of a method that returns several."""

    def __init__(self, parent: MethodNode, index: int) -> None:
        super().__init__()
        self.parent = parent
        self.index = index

    def _sources(self) -> tuple[Node, ...]:
        return (self.parent,)

    def _label(self) -> str:
        return f"{self.parent.label}[{self.index}]"


class MultiOutputNode(Node):
    """Several values as the output of a graph, whose results are then lists.

    Attributes:
        nodes: the values.

    Raises:
        GraphError: the argument is a node or no iterable, or there are several arguments.
    """

    def __init__(self, nodes: Iterable[Node], *others: object) -> None:
        if others or isinstance(nodes, Node) or not isinstance(nodes, Iterable):
            settle(nodes, others)
            given = ", ".join(label_of(each) if isinstance(each, Node) else repr(each) for each in (nodes, *others))
            raise GraphError(f"MultiOutputNode is given {given}", hint="pass a list: MultiOutputNode([node, ...])")
        super().__init__()
        self.nodes = tuple(nodes)
        for node in nodes_in(self.nodes):
            node._take_to(self)

    def _sources(self) -> tuple[Node, ...]:
        given: tuple[Any, ...] = self.nodes
        return tuple(node for node in given if isinstance(node, Node))

    def __repr__(self) -> str:
        return f"MultiOutputNode([{brief(self.nodes, {}, name_of=_name_of)}])"


def bind(
    actor: ActorInfo, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_returns: int | None = None
) -> MethodNode | tuple[OutputNode, ...]:
    """Puts a method call into the graph. Returns the call's node, or, if it returns several values, a node for each of them.

    Nodes among the arguments are found at the top level and in lists, tuples and dicts. ``num_returns`` overrides what the method
    declares.
    """
    if method not in actor.methods:
        problem, hint = unknown_method(actor, method)
        raise AttributeError(f"{problem}\nhint: {hint}")
    if num_returns is None:
        num_returns = actor.methods[method]
    if num_returns < 1:
        raise ValueError(f"num_returns of {actor.id}.{method} is {num_returns}\nhint: it is 1 or more")
    try:
        actor.check_arguments(method, args, kwargs)
        node = MethodNode(actor, method, args, kwargs, num_returns)
    except (TypeError, GraphError):
        settle(args, kwargs)
        raise
    return node.outputs or node


def nodes_in(*arguments: Any) -> tuple[Node, ...]:
    """The nodes in the arguments, at any depth, each once, in order of appearance."""
    return _nodes_among([leaf for each in arguments for leaf in leaves(each)])


def _nodes_among(found: Iterable[Any]) -> tuple[Node, ...]:
    return tuple(dict.fromkeys([leaf for leaf in found if isinstance(leaf, Node)]))


def _refuse_nodes_of_ray(found: Iterable[Any]) -> None:
    foreign: Any = getattr(sys.modules.get("ray.dag"), "DAGNode", ())
    for leaf in found:
        if isinstance(leaf, foreign):
            raise GraphError(
                f"{type(leaf).__name__} of ray.dag among the arguments of bind",
                hint="import it from crossfade.dag; a graph of Ray's own actors is taken whole, by crossfade.compile",
            )


def walk(outputs: Iterable[Node]) -> list[Node]:
    """The outputs and all nodes that they are made from, directly or not, in the order of their creation."""
    found = dict.fromkeys(outputs)
    pending = list(found)
    while pending:
        for source in pending.pop()._sources():
            if source not in found:
                found[source] = None
                pending.append(source)
    return sorted(found, key=lambda node: node._order)


def settle(*arguments: Any) -> None:
    """Counts the calls among the arguments as read: the node that was to take them was refused."""
    with suppress(GraphError):  # the arguments contain themselves
        for node in nodes_in(*arguments):
            node._is_settled = True


def leave_if_unread(node: Node, values: Iterable[Node]) -> None:
    """Leaves a `Trace` of a call that is being dropped, unless something has read it or one of its values."""
    sources = node._sources()
    if sources and not any(each._is_settled or each._is_compiled for each in (node, *values)):
        leave_trace(Trace(describe(node), node._order), sources)


def label_of(node: Node) -> str:
    """How messages and drawings call a node: ``inp.x``, ``Worker0.forward``, ``Worker0.split[1]``."""
    return node._label()


def describe(node: Node) -> str:
    """The label and, for a method call, the arguments in a few letters: ``Worker0.forward(inp.x, scale=2)``."""
    match node:
        case MethodNode():
            return f"{node.label}({brief(node.args, node.kwargs, name_of=_name_of)})"
        case OutputNode():
            return f"{describe(node.parent)}[{node.index}]"
    return label_of(node)


def _name_of(leaf: Any) -> str | None:
    return label_of(leaf) if isinstance(leaf, Node) else None


def _check_hidden(node: MethodNode, found: Iterable[Any]) -> None:
    """Finds nodes where they would be taken for constants. ``found`` has the leaves of the arguments."""
    for leaf in found:
        if isinstance(leaf, MethodType) and isinstance(leaf.__self__, Node):
            name = leaf.__name__
            raise GraphError(
                f"{node.label} is given {label_of(leaf.__self__)}.{name}, which is a method of nodes",
                hint=f'a part of the input of that name is inp["{name}"]',
            )
    hidden = find_hidden((node.args, node.kwargs), Node)
    if hidden is not None:
        source, place = hidden
        source._is_settled = True
        raise GraphError(
            f"{node.label} is given the node {describe(source)} {place}, where it cannot be found",
            hint="pass nodes at the top level, in plain lists and tuples, or as the values of plain dicts (no subclasses)",
        )
