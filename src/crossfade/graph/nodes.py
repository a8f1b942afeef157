"""Nodes: what the user says, as data. A node is one value of a graph before the graph is compiled.

::

    Node
    ├── InputNode         the argument of ``execute``
    ├── InputPart         a part of it: ``inp[0]``, ``inp["x"]``, ``inp.x``
    ├── MethodNode        what a method call gives; made by `bind`
    ├── OutputNode        one of the values of a method that returns several
    ├── CollectiveNode    what several actors do together, and CollectiveOutput, what one of them gets (`graph.collectives`)
    └── MultiOutputNode   several values as the output of a graph

A node refers to the nodes that it uses, and these refer weakly to it: a node that the user drops is gone.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakSet

from crossfade.errors import GraphError
from crossfade.graph.arguments import brief, find_hidden, leaves, snapshot
from crossfade.graph.communicators import Communicator
from crossfade.graph.hook import compiler
from crossfade.graph.movement import asked_transport, promised, target_device_of
from crossfade.hints import nearest
from crossfade.types import TargetDevice

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
    "nodes_in",
    "unknown_method",
]

_MOST_PARTS = 10**18
"""Positions that the text of a plan can have."""

_orders = itertools.count()


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """What a graph has to know about an actor.

    Attributes:
        id: unique in the session, such as ``Worker0``.
        class_name: the name of the actor's class.
        session: the id of the session that started it.
        methods: the number of values that each method returns, by the method's name.
        coroutines: the names of those declared with ``async def``, which cannot be called here.
        gpus: indices of the GPUs that it has booked.
    """

    id: str
    class_name: str
    session: str
    methods: Mapping[str, int]
    coroutines: frozenset[str] = frozenset()
    gpus: tuple[int, ...] = ()


class Node:
    """One value of a graph. Nodes are equal, and hash, by identity.

    All attributes begin with an underscore, so that an `InputNode` can give parts of every other name:

    - ``_order``: the position in the order of creation, which is topological: what a node uses was created before it.
    - ``_users``: the method calls that take this node, as far as they are still alive.
    - ``_is_compiled``: a graph was compiled of which this is an output, or a part of the input.
    - ``_transport``: how the value should move: a name, of which ``auto`` leaves it to crossfade, or a communicator.
    - ``_transport_to``: how it should move to some of its readers, by the id of the actor, where that differs.
    - ``_target_device``: where readers want the tensors in it.
    - ``_target_device_to``: the same for some of its readers, where that differs.
    - ``_static_shape``: the user promises that every execution's tensors have the same shapes and dtypes.
    - ``_direct_return``: the user promises that the value is a tensor itself.
    """

    def __init__(self) -> None:
        self._order = next(_orders)
        self._users: WeakSet[Node] = WeakSet()
        self._is_compiled = False
        self._transport: str | Communicator = "auto"
        self._transport_to: dict[str, str | Communicator] = {}
        self._target_device = TargetDevice.DEFAULT
        self._target_device_to: dict[str, TargetDevice] = {}
        self._static_shape = False
        self._direct_return = False

    def with_tensor_transport(
        self,
        transport: str | Communicator = "auto",
        device: str = "default",
        _static_shape: bool = False,
        _direct_return: bool = False,
        *,
        static_shape: bool | None = None,
        direct_return: bool | None = None,
        reader: Any = None,
    ) -> Self:
        """Says how the node's value should move. Changes the node and returns it.

        Args:
            transport: its name; an unknown one is found when the graph is compiled. The string ``nccl`` means, as in Ray, any
                transport for device tensors (``accelerator``); ``Transport.NCCL`` means NCCL. Or a `Communicator` of your own.
            device: where readers want the tensors: ``default``, ``cpu``, ``cuda`` or ``gpu``, which is the same. By default those
                that readers with a GPU want on it are the ones that come from a GPU. Parts of the input that do not say it, nor
                the transport, do as the whole.
            _static_shape: Ray's spelling of ``static_shape``.
            _direct_return: Ray's spelling of ``direct_return``.
            static_shape: every execution's tensors have the same shapes and dtypes; one that breaks this ends its execution in a
                `StaticShapeError`. It is promised of the value, for all its readers.
            direct_return: the value is a tensor itself and does not only contain tensors.
            reader: the actor to which the value should move that way; to the others it goes as it did. None means all.

        Raises:
            TypeError: the transport is neither a name nor a communicator, a flag is no bool, or the reader is no actor.
            ValueError: there is no such device.
        """
        if not isinstance(transport, str | Communicator):
            raise TypeError(
                f"{transport!r} is not the name of a transport\nhint: give a name, such as 'shm' or 'gloo', or a Communicator"
            )
        is_static = promised("static_shape", static_shape, _static_shape)
        is_direct = promised("direct_return", direct_return, _direct_return)
        asked, target_device = asked_transport(transport), target_device_of(device)
        if reader is None:
            self._transport, self._transport_to = asked, {}
            self._target_device, self._target_device_to = target_device, {}
        else:
            self._transport_to[_id_of(reader)] = asked
            self._target_device_to[_id_of(reader)] = target_device
        if reader is None or _static_shape or static_shape is not None:  # a way to one reader takes no promise back
            self._static_shape = is_static
        if reader is None or _direct_return or direct_return is not None:
            self._direct_return = is_direct
        return self

    def with_type_hint(self, hint: Any) -> Self:
        """The older spelling of `with_tensor_transport`.

        Args:
            hint: a ``TorchTensorType``, or another object with the attribute ``transport``.

        Raises:
            TypeError: the hint has no transport.
        """
        if not hasattr(hint, "transport"):
            raise TypeError(f"{hint!r} does not say a transport\nhint: pass TorchTensorType(transport=...)")
        return self.with_tensor_transport(
            hint.transport,
            getattr(hint, "device", "default"),
            static_shape=getattr(hint, "static_shape", False),
            direct_return=getattr(hint, "direct_return", False),
        )

    def compile(self, *unnamed: Any, **options: Any) -> Any:
        """Compiles the graph whose output is this node.

        Args:
            *unnamed: refused.
            **options: those of the installed compiler, which returns the compiled graph.

        Raises:
            GraphError: the graph is not sound; the message names the node and ends in a hint.
            TypeError: an option without its name, an unknown one, or one of the wrong type.
        """
        if unnamed:
            raise TypeError(
                f"compile is given {unnamed[0]!r}\nhint: options go by name, such as compile(max_inflight=10)"
            )
        return compiler()(self, **options)

    def experimental_compile(self, *unnamed: Any, **options: Any) -> Any:
        """Ray's name for `compile`."""
        return self.compile(*unnamed, **options)

    def _sources(self) -> tuple[Node, ...]:
        """What `graph.walk.inputs_of` gives for nodes that this file does not know."""
        return ()

    def _label(self) -> str:
        """What `label_of` gives for them."""
        return type(self).__name__

    if not TYPE_CHECKING:  # else every name would be one of a node's

        def __getattr__(self, name: str) -> Any:
            """Asked only for names that a node does not have."""
            if name in ("execute", "execute_async", "plan", "statistics", "teardown", "timeline", "visualize"):
                raise AttributeError(
                    f"{label_of(self)} is a node of a graph that is not compiled, and has no {name}\n"
                    f"hint: graph = node.compile(), then graph.{name}"
                )
            return object.__getattribute__(self, name)  # raises what Python says

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"{label_of(self)} stands for one value, which is not there yet, and cannot be iterated over or unpacked\n"
            "hint: a method that returns several values says so with num_returns; parts of the input are inp[0], inp.x"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{label_of(self)} is a node of a graph and cannot be copied, pickled or sent to an actor\n"
            "hint: among the arguments of bind, nodes are found at the top level and in lists, tuples and dicts only"
        )


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

    def __repr__(self) -> str:
        return "InputNode()"


class InputPart(Node):
    """A part of the argument of ``execute``.

    Attributes:
        parent: the whole.
    """

    def __init__(self, parent: InputNode, key: str) -> None:
        super().__init__()
        self.parent = parent
        self._key = key  # ``[0]``, ``["x"]`` (a string as in JSON) or ``.x``

    def __repr__(self) -> str:
        return f"InputPart({label_of(self)})"


class MethodNode(Node):
    """A method call. It is a value itself if the method returns one value, else its ``outputs`` are.

    Attributes:
        actor: whose method it is.
        method: the method's name.
        args: the positional arguments as they were when they were bound.
        kwargs: the keyword arguments likewise.
        num_returns: how many values the method returns.
        inputs: the nodes among the arguments, at any depth, each once, in order of appearance.
        outputs: one node for each value of a method that returns several; else empty.
    """

    def __init__(
        self, actor: ActorInfo, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_returns: int = 1
    ) -> None:
        super().__init__()
        self.actor = actor
        self.method = method
        self.args: tuple[Any, ...] = snapshot(args)
        self.kwargs: dict[str, Any] = snapshot(kwargs)
        self.num_returns = num_returns
        _check_hidden(self)
        self.inputs = nodes_in(self.args, self.kwargs)
        self.outputs = tuple(OutputNode(self, index) for index in range(num_returns)) if num_returns > 1 else ()
        for node in self.inputs:
            node._users.add(self)

    @property
    def label(self) -> str:
        """Actor and method, such as ``Worker0.forward``; not unique if the method is bound more than once."""
        return f"{self.actor.id}.{self.method}"

    def __repr__(self) -> str:
        return f"MethodNode({describe(self)})"


class OutputNode(Node):
    """One value of a method that returns several.

    Attributes:
        parent: the method call.
        index: which of its values.
    """

    def __init__(self, parent: MethodNode, index: int) -> None:
        super().__init__()
        self.parent = parent
        self.index = index

    def __repr__(self) -> str:
        return f"OutputNode({label_of(self)})"


class MultiOutputNode(Node):
    """Several values as the output of a graph, whose results are then lists.

    Attributes:
        nodes: the values.

    Raises:
        TypeError: it is given nodes, or something else, and no list of them.
    """

    def __init__(self, nodes: Iterable[Node], *others: object) -> None:
        if others or isinstance(nodes, Node) or not isinstance(nodes, Iterable):
            given = ", ".join(label_of(each) if isinstance(each, Node) else repr(each) for each in (nodes, *others))
            raise TypeError(f"MultiOutputNode is given {given}\nhint: pass a list: MultiOutputNode([node, ...])")
        super().__init__()
        self.nodes = tuple(nodes)

    def __repr__(self) -> str:
        return f"MultiOutputNode([{brief(self.nodes, {}, name_of=_name_of)}])"


def bind(
    actor: ActorInfo, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_returns: int | None = None
) -> MethodNode | tuple[OutputNode, ...]:
    """Puts a method call into the graph.

    Args:
        actor: whose method it is.
        method: the method's name.
        args: positional arguments; nodes among them are found at the top level and in lists, tuples and dicts.
        kwargs: keyword arguments, likewise.
        num_returns: how many values the method returns, if not as many as it declares.

    Returns:
        The call's node, or, if it returns several values, a node for each of them.

    Raises:
        AttributeError: the actor has no such method.
        ValueError: ``num_returns`` is not positive.
        GraphError: a node is where it cannot be found, such as in a set; or the arguments contain themselves.
    """
    if method not in actor.methods:
        problem, hint = unknown_method(actor, method)
        raise AttributeError(f"{problem}\nhint: {hint}")
    if num_returns is None:
        num_returns = actor.methods[method]
    if num_returns < 1:
        raise ValueError(f"num_returns of {actor.id}.{method} is {num_returns}\nhint: it is 1 or more")
    node = MethodNode(actor, method, args, kwargs, num_returns)
    return node.outputs or node


def nodes_in(*arguments: Any) -> tuple[Node, ...]:
    """The nodes in the arguments, at any depth, each once, in order of appearance."""
    return tuple(dict.fromkeys(leaf for each in arguments for leaf in leaves(each) if isinstance(leaf, Node)))


def label_of(node: Node) -> str:
    """How messages and drawings call a node: ``inp.x``, ``Worker0.forward``, ``Worker0.split[1]``."""
    match node:
        case InputPart():
            return f"inp{node._key}"
        case InputNode():
            return "inp"
        case MethodNode():
            return node.label
        case OutputNode():
            return f"{node.parent.label}[{node.index}]"
    return node._label()


def describe(node: Node) -> str:
    """The label and, for a method call, the arguments in a few letters: ``Worker0.forward(inp.x, scale=2)``."""
    match node:
        case MethodNode():
            return f"{node.label}({brief(node.args, node.kwargs, name_of=_name_of)})"
        case OutputNode():
            return f"{describe(node.parent)}[{node.index}]"
    return label_of(node)


def unknown_method(actor: ActorInfo, method: str) -> tuple[str, str]:
    """What to say about a method that the actor does not have: the problem and the hint."""
    public = [name for name in actor.methods if not name.startswith("_")]
    has = f"{actor.id} has {', '.join(public)}" if public else f"{actor.id} has no methods"
    return f"actor {actor.id} ({actor.class_name}) has no method {method!r}", nearest(method, public, has)


def _name_of(leaf: Any) -> str | None:
    return label_of(leaf) if isinstance(leaf, Node) else None


def _id_of(reader: Any) -> str:
    """An actor's id, from its handle."""
    info = getattr(reader, "_info", reader)
    if not isinstance(info, ActorInfo):
        raise TypeError(f"{reader!r} is no actor\nhint: pass the handle that Cls.remote() returned")
    return info.id


def _check_hidden(node: MethodNode) -> None:
    """Finds nodes where they would be taken for constants."""
    for leaf in (*leaves(node.args), *leaves(node.kwargs)):
        if isinstance(leaf, MethodType) and isinstance(leaf.__self__, Node):
            name = leaf.__name__
            raise GraphError(
                f"{node.label} is given {label_of(leaf.__self__)}.{name}, which is a method of nodes",
                hint=f'a part of the input of that name is inp["{name}"]',
            )
    hidden = find_hidden((node.args, node.kwargs), Node)
    if hidden is not None:
        source, place = hidden
        raise GraphError(
            f"{node.label} is given the node {describe(source)} {place}, where it cannot be found",
            hint="pass nodes at the top level, in plain lists and tuples, or as the values of plain dicts (no subclasses)",
        )
