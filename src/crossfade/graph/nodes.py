"""What the user says: nodes, which are calls of actors' methods and the values that go between them. Data only."""

from __future__ import annotations

import difflib
import itertools
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from crossfade.graph.hook import compiler

__all__ = ["ActorInfo", "InputNode", "InputPart", "MethodNode", "MultiOutputNode", "Node", "OutputNode", "bind", "nodes_in", "walk"]

_orders = itertools.count()


@dataclass(frozen=True)
class ActorInfo:
    """An actor, as a graph knows it.

    Attributes:
        id: its name, unique in its session.
        class_name: the name of its class.
        session: the id of the session that it belongs to.
        methods: number of returns of each of its methods, by name.
    """

    id: str
    class_name: str
    session: str
    methods: Mapping[str, int]


class Node:
    """A value of a graph that is being written.

    Attributes:
        order: counts nodes in the order in which they were made. Arguments exist before the node that takes them, so this is
            a topological order.
        users: the nodes that take this one, as long as they are alive.
        transport: how the value should move; see `with_tensor_transport`.
    """

    def __init__(self) -> None:
        self.order = next(_orders)
        self.users: weakref.WeakSet[Node] = weakref.WeakSet()
        self.transport = "auto"
        self.static_shape = False
        self.direct_return = False

    def with_tensor_transport(
        self,
        transport: Any = "auto",
        device: str = "default",
        _static_shape: bool = False,
        _direct_return: bool = False,
        *,
        static_shape: bool | None = None,
        direct_return: bool | None = None,
    ) -> Self:
        """Says how this value moves between actors; changes the node and returns it, as in Ray.

        Args:
            transport: ``auto``, ``shm``, ``gloo``, or a `Transport`. Whether it exists is checked when the graph is compiled.
            device: accepted for Ray's sake.
            static_shape: every execution's tensors have the same shapes and dtypes.
            direct_return: the value is a tensor itself, not something that holds tensors.
        """
        self.transport = str(getattr(transport, "transport", transport))
        self.static_shape = _static_shape if static_shape is None else static_shape
        self.direct_return = _direct_return if direct_return is None else direct_return
        return self

    def with_type_hint(self, hint: Any) -> Self:
        """Ray's older spelling of `with_tensor_transport`: takes its setting from the hint's attribute ``transport``."""
        return self.with_tensor_transport(getattr(hint, "transport", "auto"))

    def compile(self, **options: Any) -> Any:
        """Compiles the graph that ends in this node; see `crossfade.CompiledGraph` for what comes back.

        Args:
            options: ``max_inflight``, ``overlap``, ``buffer_bytes``, ``submit_timeout``, ``record``.
        """
        return compiler()(self, **options)

    def experimental_compile(self, **options: Any) -> Any:
        """Ray's name for `compile`."""
        return self.compile(**options)

    def __iter__(self) -> Iterator[NoReturn]:
        raise TypeError(f"{self!r} is one value of a graph\nhint: declare the method with @crossfade.method(num_returns=k) to unpack it")

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled\nhint: a graph stays in the program that compiles it")


class InputNode(Node):
    """What ``execute`` is called with: all of it, or by ``inp[0]``, ``inp["x"]`` and ``inp.x`` parts of it.

    Example:
        >>> with crossfade.InputNode() as inp:
        ...     dag = worker.work.bind(inp)
    """

    key = "*"

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, InputPart] = {}

    def _part(self, key: str) -> InputPart:
        if key not in self.parts:
            self.parts[key] = InputPart(self, key)
        return self.parts[key]

    def __getitem__(self, key: int | str) -> InputPart:
        if not isinstance(key, int | str) or isinstance(key, bool):
            raise TypeError(f"inp[{key!r}] is no part of the input\nhint: use an int or a str")
        return self._part(f"[{key}]" if isinstance(key, int) else f"[{json.dumps(key)}]")

    def __getattr__(self, name: str) -> InputPart:
        if name.startswith("_"):  # copy, pickle and inspect look for such names
            raise AttributeError(name)
        return self._part(f".{name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def __repr__(self) -> str:
        return "InputNode()"


class InputPart(Node):
    """A part of the input.

    Attributes:
        source: the whole.
        key: ``[0]``, ``["x"]`` or ``.x``.
    """

    def __init__(self, source: InputNode, key: str) -> None:
        super().__init__()
        self.source = source
        self.key = key

    def __repr__(self) -> str:
        return f"InputNode(){self.key}"


class MethodNode(Node):
    """One call of a method of an actor; made by ``handle.method.bind(...)``.

    Attributes:
        actor, method: what is called.
        args, kwargs: with what. Lists, tuples and dicts are copied, so a later change of the user's list changes nothing.
        num_returns: how many values it gives.
        inputs: the distinct nodes among the arguments, in order of appearance.
        outputs: one node for each value if there are several, else empty.
    """

    def __init__(self, actor: ActorInfo, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_returns: int = 1) -> None:
        super().__init__()
        self.actor = actor
        self.method = method
        self.args = _snapshot(args)
        self.kwargs = _snapshot(kwargs)
        self.num_returns = num_returns
        self.inputs = tuple(dict.fromkeys((*nodes_in(self.args), *nodes_in(self.kwargs))))
        for node in self.inputs:
            node.users.add(self)
        self.outputs = tuple(OutputNode(self, index) for index in range(num_returns)) if num_returns > 1 else ()

    @property
    def label(self) -> str:
        """The actor and the method."""
        return f"{self.actor.id}.{self.method}"

    def __repr__(self) -> str:
        shown = [repr(arg) if isinstance(arg, Node) and not isinstance(arg, MethodNode) else _short(arg) for arg in self.args]
        shown += [f"{name}={_short(value)}" for name, value in self.kwargs.items()]
        return f"{self.label}({', '.join(shown)})"


class OutputNode(Node):
    """One of several values that a method gives.

    Attributes:
        parent: the call.
        index: which of its values.
    """

    def __init__(self, parent: MethodNode, index: int) -> None:
        super().__init__()
        self.parent = parent
        self.index = index
        parent.users.add(self)

    def __repr__(self) -> str:
        return f"{self.parent!r}[{self.index}]"


class MultiOutputNode:
    """Several nodes as the end of a graph: ``execute`` gives a list of references.

    Args:
        nodes: the nodes whose values an execution gives.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)

    def compile(self, **options: Any) -> Any:
        """See `Node.compile`."""
        return compiler()(self, **options)

    def experimental_compile(self, **options: Any) -> Any:
        """Ray's name for `compile`."""
        return self.compile(**options)

    def __repr__(self) -> str:
        return f"MultiOutputNode({self.nodes!r})"


def bind(
    actor: ActorInfo, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_returns: int | None = None
) -> MethodNode | tuple[OutputNode, ...]:
    """The node of a call, or the nodes of its values if it gives several.

    Raises:
        AttributeError: the actor has no such method.
    """
    if method not in actor.methods:
        close = difflib.get_close_matches(method, actor.methods, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise AttributeError(f"actor {actor.id} has no method {method!r}\nhint: {meant}it has {', '.join(actor.methods)}")
    node = MethodNode(actor, method, args, kwargs, actor.methods[method] if num_returns is None else num_returns)
    return node.outputs or node


def nodes_in(template: Any) -> Iterator[Node]:
    """The nodes among arguments, inside lists, tuples and dicts too."""
    if isinstance(template, Node):
        yield template
    elif type(template) in (list, tuple):
        for item in template:
            yield from nodes_in(item)
    elif type(template) is dict:
        for item in template.values():
            yield from nodes_in(item)


def walk(outputs: Iterable[Node]) -> list[Node]:
    """Everything that the outputs depend on, and they themselves, in a topological order (the order of creation)."""
    found: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += sources(node)
    return sorted(found, key=lambda node: node.order)


def sources(node: Node) -> tuple[Node, ...]:
    """What a node depends on directly."""
    if isinstance(node, MethodNode):
        return node.inputs
    if isinstance(node, OutputNode):
        return (node.parent,)
    return (node.source,) if isinstance(node, InputPart) else ()


def _snapshot(template: Any) -> Any:
    kind = type(template)
    if kind is list:
        return [_snapshot(item) for item in template]
    if kind is tuple:
        return tuple(_snapshot(item) for item in template)
    if kind is dict:
        return {key: _snapshot(item) for key, item in template.items()}
    return template


def _short(value: Any) -> str:
    if isinstance(value, MethodNode):
        return f"{value.label}(...)"
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
