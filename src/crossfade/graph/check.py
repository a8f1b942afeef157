"""Finds the mistakes in a graph. Every message names the node and ends in a hint.

What is looked at is everything that the outputs are made from, then everything that is made from that: what the user
bound and forgot. Nothing here recurses along the graph, and the time grows with nodes and edges as ``n log n``.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossfade.errors import GraphError, UnknownTransport
from crossfade.graph.actors import unknown_method
from crossfade.graph.collectives import CollectiveNode
from crossfade.graph.members import members_of
from crossfade.graph.nodes import (
    ActorInfo,
    InputNode,
    InputPart,
    MethodNode,
    MultiOutputNode,
    Node,
    OutputNode,
    describe,
    label_of,
    walk,
)
from crossfade.graph.unread import Trace, next_order
from crossfade.hints import nearest
from crossfade.types import DRIVER


@dataclass(frozen=True, slots=True)
class CheckedGraph:
    """A graph without mistakes."""

    input: InputNode | None  # the argument of ``execute``, if the graph uses it or parts of it
    # the whole of it and the parts of it that are arguments of methods, in the order of their creation.
    input_parts: tuple[InputNode | InputPart, ...]
    # the method calls; each comes after what it uses, and they are in the order of their creation.
    methods: tuple[MethodNode, ...]
    # the values that an execution gives: method calls with one value, or single values of the others.
    outputs: tuple[Node, ...]
    returns_list: bool  # whether an execution gives a list of them, or the only one
    collectives: tuple[CollectiveNode, ...] = ()  # what actors do together, likewise sorted
    # indices of the GPUs of the actors that have any, by the actor's id.
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def actors(self) -> tuple[str, ...]:
        """The ids of the actors that take part."""
        parties = [node.actor.id for node in self.methods]
        parties += [actor.id for node in self.collectives for actor in node.parties]
        return tuple(dict.fromkeys(parties))

    @property
    def steps(self) -> list[MethodNode | CollectiveNode]:
        """Method calls and collectives in one order, that of their creation."""
        return sorted((*self.methods, *self.collectives), key=lambda node: node._order)


def check(output: Node | MultiOutputNode, *, session: str, transports: Collection[str]) -> CheckedGraph:
    """Finds the mistakes in a graph: raises a `GraphError`, or returns the graph, sorted.

    All actors must belong to ``session``. ``transports`` has the names that a node may ask for.
    """
    outputs = _outputs_of(output)
    for node in outputs:
        node._is_compiled = True  # even if compiling fails: the user meant it as a graph
    nodes = walk(outputs)
    methods = tuple(node for node in nodes if isinstance(node, MethodNode))
    for node in nodes:
        if isinstance(node, MethodNode):
            _check_arguments(node)
            _check_actor(node, session)
        elif isinstance(node, CollectiveNode):
            for actor in node.parties:
                _check_session(label_of(node), actor, session)
        for asked in (node._transport, *node._transport_to.values()):
            if isinstance(asked, str):
                _check_transport(node, asked, transports)
            else:
                for actor in members_of(asked):
                    _check_session(f"the communicator of {label_of(node)}", actor, session)
    _check_readers(nodes)
    whole = _only_input(nodes)
    _check_all_used(nodes, output)
    for node in nodes:
        node._is_compiled = True
    used = dict.fromkeys(source for node in methods for source in node.inputs)
    parts = sorted((node for node in used if isinstance(node, InputNode | InputPart)), key=lambda part: part._order)
    collectives = tuple(node for node in nodes if isinstance(node, CollectiveNode))
    actors = [*(node.actor for node in methods), *(actor for node in collectives for actor in node.parties)]
    return CheckedGraph(
        input=whole,
        input_parts=tuple(parts),
        methods=methods,
        outputs=outputs,
        returns_list=isinstance(output, MultiOutputNode),
        collectives=collectives,
        devices={actor.id: actor.gpus for actor in actors if actor.gpus},
    )


# The outputs


def _outputs_of(output: Any) -> tuple[Node, ...]:
    if not isinstance(output, Node):
        is_sequence = isinstance(output, list | tuple)
        raise GraphError(
            f"a graph is compiled from a node, not from {_article(output)}",
            hint="wrap the nodes: MultiOutputNode([...])" if is_sequence else "compile what method.bind(...) returned",
        )
    if not isinstance(output, MultiOutputNode):
        return (_check_output(output, "the output"),)
    if not output.nodes:
        raise GraphError("MultiOutputNode([]) has no outputs", hint="list at least one node in it")
    return tuple(_check_output(node, f"output {index} of MultiOutputNode") for index, node in enumerate(output.nodes))


def _check_output(node: Any, place: str) -> Node:
    match node:
        case InputNode() | InputPart():
            problem = f"{place} is {label_of(node)}, a part of the input, which no actor works on"
            hint = "pass it through a method, or leave it out: whoever calls execute has it"
        case MultiOutputNode():
            problem = f"{place} is a MultiOutputNode itself"
            hint = "list all nodes in one MultiOutputNode"
        case MethodNode() if node.num_returns > 1:
            problem = f"{place} is {describe(node)}, which returns {node.num_returns} values"
            hint = "list the values that bind returned: MultiOutputNode([first, second, ...])"
        case Node():
            return node
        case tuple() | list() if node and all(isinstance(item, Node) for item in node):
            problem = f"{place} is {_article(node)} of {len(node)} nodes"
            hint = "unpack it: MultiOutputNode([*values]); a method with several returns is bound to a tuple of nodes"
        case _:
            problem = f"{place} is {_article(node)} and no node"
            hint = "list what method.bind(...) returned; a constant needs no graph"
    raise GraphError(problem, hint=hint)


def _article(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# The nodes that the outputs are made from


def _check_arguments(node: MethodNode) -> None:
    for source in node.inputs:
        if isinstance(source, MultiOutputNode):
            raise GraphError(
                f"{describe(node)} takes a MultiOutputNode as an argument, which is the output of a graph and no value",
                hint="pass a list of its nodes: bind([first, second, ...])",
            )
        if isinstance(source, MethodNode) and source.num_returns > 1:
            raise GraphError(
                f"{describe(node)} takes all of {describe(source)}, which returns {source.num_returns} values",
                hint="pass the values that bind returned, which is a tuple of nodes",
            )


def _check_actor(node: MethodNode, session: str) -> None:
    actor = node.actor
    _check_session(node.label, actor, session)
    if actor.id == DRIVER:
        raise GraphError(
            f"{describe(node)} runs on an actor named {DRIVER!r}, which is the name of the driving process itself",
            hint="give the actor another name",
        )
    if node.method not in actor.methods:
        problem, hint = unknown_method(actor, node.method)
        raise GraphError(f"{describe(node)} cannot run: {problem}", hint=hint)


def _check_session(label: str, actor: ActorInfo, session: str) -> None:
    if actor.session != session:
        raise GraphError(
            f"{label} runs on another driver's actor: {actor.id} belongs to another session or one that is over",
            hint=f"start the actor again in this session: {actor.class_name}.remote(...)",
        )


def _check_transport(node: Node, asked: str, transports: Collection[str]) -> None:
    if asked in transports:
        return
    names = sorted(transports)
    hint = nearest(asked.lower(), names, f"the transports are {', '.join(names)}")
    raise UnknownTransport(f"{describe(node)} asks for the transport {asked!r}, which does not exist", hint=hint)


def _check_readers(nodes: Iterable[Node]) -> None:
    """Each actor that is named as a reader reads the value."""
    asking = [node for node in nodes if node._transport_to]
    if not asking:
        return
    readers: dict[Node, set[str]] = {}
    for method in (node for node in nodes if isinstance(node, MethodNode)):
        for source in method.inputs:
            readers.setdefault(source, set()).add(method.actor.id)
            if isinstance(source, OutputNode | InputPart):
                readers.setdefault(source.parent, set()).add(method.actor.id)
    for node in asking:
        for actor in node._transport_to.keys() - readers.get(node, set()):
            known = ", ".join(sorted(readers.get(node, set()))) or "no actor"
            raise GraphError(
                f"{describe(node)} asks for a transport to {actor}, which does not read it",
                hint=f"it is read by {known}",
            )


def _only_input(nodes: Iterable[Node]) -> InputNode | None:
    inputs = [node for node in nodes if isinstance(node, InputNode)]
    if len(inputs) <= 1:
        return inputs[0] if inputs else None
    users = [next((describe(user) for user in nodes if _takes(user, whole)), "no method") for whole in inputs]
    raise GraphError(
        f"the graph has {len(inputs)} InputNodes: {users[0]} uses one, {users[1]} another",
        hint="use one InputNode, and parts of it for several arguments: inp[0], inp['x'], inp.x",
    )


def _takes(user: Node, whole: InputNode) -> bool:
    """Whether the node is a method call with this input, or a part of it, among its arguments."""
    sources = user.inputs if isinstance(user, MethodNode) else ()
    return any(source is whole or (isinstance(source, InputPart) and source.parent is whole) for source in sources)


# What is made from them


def _check_all_used(nodes: Sequence[Node], output: Node) -> None:
    """Everything that was bound, and every part of the input that was asked for, is used.

    Nothing in this function, or in the error, refers to what is forgotten: an error that is kept, as interactive
    sessions do with the last one, must not keep alive what the hint says to drop.
    """
    if not _forgotten(nodes, output):
        return
    gc.collect()  # an error may have named nodes that the user has dropped since; a cycle of references may still hold them
    error = _tell_forgotten(nodes, output)
    if error is not None:
        raise error


def _tell_forgotten(nodes: Sequence[Node], output: Node) -> GraphError | None:
    """Makes the error, which names the first forgotten call (or else part). All forgotten calls then count as reported."""
    forgotten = _forgotten(nodes, output)
    parts = [each for each in forgotten if isinstance(each, InputPart)]
    calls = [each for each in forgotten if not isinstance(each, InputPart)]
    for each in calls:
        if isinstance(each, Trace):
            each.told_at = each.told_at or next_order()
        else:
            each._is_settled = True
    if calls:
        first, num_more = calls[0], len(calls) - 1
        more = f" (nor {num_more} more call{'s' if num_more > 1 else ''})" if num_more else ""
        call = first.call if isinstance(first, Trace) else describe(first)
        hint = "list it in MultiOutputNode([...]), or drop every reference to it"
        if isinstance(first, Trace):
            hint = "bind it again and list it in MultiOutputNode([...]), or leave it out and bind the output again"
        return GraphError(f"nothing uses {call}{more}, and it is no output of the graph", hint=hint)
    if parts:
        return GraphError(
            f"{label_of(parts[0])} was asked for, but no method uses it",
            hint="pass it to a method, or use a new InputNode that is not asked for it",
        )
    return None


def _forgotten(nodes: Sequence[Node], output: Node) -> list[MethodNode | CollectiveNode | InputPart | Trace]:
    """Finds calls that nothing uses, traces of such calls, and parts of the input that nothing uses, in order of creation.
    Nodes of other graphs count as used: several graphs may share an input.
    """
    seen = dict.fromkeys(nodes)
    pending = list(seen)
    forgotten: dict[MethodNode | CollectiveNode | InputPart | Trace, None] = {}
    while pending:
        node = pending.pop()
        values = node.outputs if isinstance(node, MethodNode | CollectiveNode) else ()
        is_used = any([each._users or each._is_compiled for each in (node, *values)])
        if not is_used and isinstance(node, MethodNode | CollectiveNode | InputPart):
            forgotten[node] = None
        if node._trace is not None and node._trace.concerns(output._order):
            forgotten[node._trace] = None
        parts = node._parts.values() if isinstance(node, InputNode) else ()
        followers = (*node._users, *values, *parts)  # what is made from it directly
        pending += [each for each in followers if each not in seen]
        seen.update(dict.fromkeys(followers))
    return sorted(forgotten, key=lambda each: each.order if isinstance(each, Trace) else each._order)
