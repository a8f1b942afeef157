"""Graphs that were built with Ray's own ``bind``, read as data: nothing here knows crossfade's nodes.

Ray's private names are those of Ray 2.60. Calls of one actor are in the order of their bind index, which a *handle* counts: of
calls through two handles of one actor, which count separately, only the values that go between them say which comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from operator import methodcaller
from typing import Any

import ray
import ray.dag as rays
from ray.dag.collective_node import CollectiveOutputNode
from ray.experimental.channel.torch_tensor_type import TorchTensorType
from ray.experimental.compiled_dag_ref import CompiledDAGRef
from ray.experimental.util.types import AllGatherOp, AllReduceOp, ReduceScatterOp

from crossfade.errors import ActorDiedError, GraphError
from crossfade.interrupted import brief

_KINDS = {AllReduceOp: "allreduce", AllGatherOp: "allgather", ReduceScatterOp: "reducescatter"}


@dataclass(frozen=True, slots=True)
class Hint:
    """What ``with_tensor_transport`` said of a value."""

    transport: str
    device: str
    static_shape: bool
    direct_return: bool


@dataclass(frozen=True, slots=True)
class Input:
    """All of the input, or with a key a part of it."""

    key: int | str | None = None
    by_name: bool = False  # ``inp.key``, and not ``inp[key]``


@dataclass(frozen=True, slots=True)
class Call:
    """A method call."""

    handle: Any
    method: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    num_returns: int


@dataclass(frozen=True, slots=True)
class Output:
    """One of the values of a call or of a collective."""

    of: Any  # the node that makes them
    index: int


@dataclass(frozen=True, slots=True)
class Collective:
    """One actor's place in a collective; the first of its places stands for all."""

    kind: str
    op: str
    members: Sequence[Sequence[Any]]  # for each tensor the nodes that bring it, one of each actor
    rank: int
    places: Sequence[Any]  # the nodes of all its places, by rank


@dataclass(frozen=True, slots=True)
class Step:
    """A node of Ray's, which others may name in their arguments, and what it is."""

    node: Any
    what: Input | Call | Output | Collective
    hint: Hint | None


class RaysActorDied(ActorDiedError, ray.exceptions.ActorDiedError):  # type: ignore[misc]
    """Ours, which programs for Ray catch by its name there."""

    @classmethod
    def of(cls, error: ActorDiedError) -> RaysActorDied:
        made = cls.__new__(cls, *error.args)
        made.args = error.args
        made.__dict__.update(error.__dict__)
        return made

    def __str__(self) -> str:
        return ActorDiedError.__str__(self)


class RaysRef(CompiledDAGRef):  # type: ignore[misc]
    """A reference of ours that ``ray.get`` takes."""

    def __init__(self, reference: Any, error: ActorDiedError | None = None) -> None:
        self._reference = reference
        self._error = error  # why there is no reference

    def get(self, timeout: float | None = None) -> Any:
        try:
            if self._error is not None:
                raise self._error
            return self._reference.get(timeout)
        except ActorDiedError as error:
            raise RaysActorDied.of(error) from error

    def __await__(self) -> Any:
        try:
            if self._error is not None:
                raise self._error
            return (yield from self._reference.__await__())
        except ActorDiedError as error:
            raise RaysActorDied.of(error) from error

    def __str__(self) -> str:
        return str(self._reference)

    @brief
    def __del__(self) -> None:
        """Nothing: ours may be dropped at any time."""


def outputs_of(dag: Any) -> tuple[list[Any], bool]:
    """The nodes whose values an execution gives, and whether as a list."""
    if isinstance(dag, rays.MultiOutputNode):
        return list(dag.get_args()), True
    return [dag], False


def steps_of(outputs: Iterable[Any]) -> list[Step]:
    """All nodes that the outputs are made from, in an order that actors can keep to. A `GraphError` says what cannot be taken
    over.
    """
    nodes: dict[Any, list[Any]] = {}
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node not in nodes:
            nodes[node] = _sources(node)
            pending += nodes[node]
    counted = [node for node in nodes if _bind_index(node) is not None]
    by_handle: dict[int, list[Any]] = {}
    for node in counted:
        by_handle.setdefault(id(node._get_actor_handle()), []).append(node)
    before = {node: set(sources) for node, sources in nodes.items()}
    for calls in by_handle.values():
        for first, second in pairwise(sorted(calls, key=methodcaller("_get_bind_index"))):
            before[second].add(first)
    places = _collectives(nodes)
    for node, group in places.items():  # all places of a collective are made with the first
        for each in group:
            before[node] |= {source for source in _sources(each) if source is not node}
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise GraphError(
            f"{_name(error.args[1][0])} is bound before what it needs: calls of an actor run in the order in which they are bound",
            hint="bind the calls of an actor in the order of their values",
        ) from None
    return [Step(node, _what(node, places), _hint(node)) for node in order]


def _sources(node: Any) -> list[Any]:
    if isinstance(node, rays.ClassMethodNode) and node.is_class_method_output:
        return [node.class_method_call]
    if isinstance(node, rays.ClassNode | rays.FunctionNode | rays.MultiOutputNode):
        raise _refused(node)
    return list(node._upstream_nodes)


def _refused(node: Any) -> GraphError:
    match node:
        case rays.ClassNode():
            return GraphError(
                f"{_name(node)} makes an actor in the graph",
                hint="make actors before: Cls.remote(...), then .method.bind",
            )
        case rays.FunctionNode():
            return GraphError(f"{_name(node)} is a remote function", hint="a graph runs methods of actors")
        case rays.MultiOutputNode():
            return GraphError("a MultiOutputNode is an argument", hint="pass a list of its nodes")
    return GraphError(
        f"{_name(node)} cannot be taken over", hint="bind methods of actors, InputNode and MultiOutputNode"
    )


def _name(node: Any) -> str:
    if isinstance(node, rays.ClassMethodNode):
        return f"{class_name(node._get_actor_handle())}.{node.get_method_name()}"
    return type(node).__name__


def class_name(handle: Any) -> str:
    """The name of an actor's class."""
    return str(handle._ray_actor_creation_function_descriptor.class_name).rpartition(".")[2] if handle else "an actor"


def _bind_index(node: Any) -> int | None:
    if not isinstance(node, rays.ClassMethodNode) or node.is_class_method_output:
        return None
    index: int = node._get_bind_index()
    return index


def _collectives(nodes: Iterable[Any]) -> dict[Any, list[Any]]:
    """For each place of a collective all of its places that are in the graph."""
    found: dict[int, list[Any]] = {}
    for node in nodes:
        if isinstance(node, CollectiveOutputNode) and not node.is_class_method_output:
            found.setdefault(id(node.collective_op), []).append(node)
    for group in found.values():
        if len(group) != len(group[0].collective_op.actor_handles):
            raise GraphError(
                f"of {_name(group[0])} only {len(group)} of {len(group[0].collective_op.actor_handles)} outputs are used",
                hint="every actor of a collective needs its output in the graph: list the others in the MultiOutputNode",
            )
    return {node: group for group in found.values() for node in group}


def _what(node: Any, places: dict[Any, list[Any]]) -> Input | Call | Output | Collective:
    match node:
        case rays.InputAttributeNode():
            return Input(node.key, node._accessor_method == "__getattr__")
        case rays.InputNode():
            return Input()
        case rays.ClassMethodNode() if node.is_class_method_output:
            return Output(node.class_method_call, node.output_idx)
        case CollectiveOutputNode():
            return _collective(node, places[node])
        case rays.ClassMethodNode() if node._get_actor_handle() is not None:
            kwargs = dict(node.get_kwargs())
            return Call(
                node._get_actor_handle(), node.get_method_name(), node.get_args(), kwargs, node.num_returns or 1
            )
    raise _refused(node)


def _collective(node: Any, group: list[Any]) -> Collective:
    operation = node.collective_op
    ranks = {handle._actor_id: rank for rank, handle in enumerate(operation.actor_handles)}
    placed = sorted(group, key=lambda each: ranks[each._get_actor_handle()._actor_id])
    tensors = list(zip(*(each.get_args() for each in placed), strict=True))
    op = operation._op
    name = getattr(getattr(op, "reduceOp", None), "name", "SUM").lower()
    return Collective(_KINDS[type(op)], name, tensors, placed.index(node), placed)


def _hint(node: Any) -> Hint | None:
    hint = node.type_hint
    if isinstance(node, CollectiveOutputNode) or not hasattr(hint, "_device"):
        return None
    if isinstance(hint, TorchTensorType) and hint._communicator is not None:
        raise GraphError(
            f"{_name(node)} asks for a communicator of Ray's class",
            hint="make it one of crossfade's (docs: communicators), or name a transport",
        )
    transport = getattr(hint, "transport", "auto")
    return Hint(transport, str(getattr(hint._device, "value", hint._device)), hint._static_shape, hint._direct_return)


def replaced(value: Any, made: Callable[[Any], Any]) -> Any:
    """An argument with what was made of the nodes in it."""
    match value:
        case rays.DAGNode():
            return made(value)
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(replaced(each, made) for each in value)
        case dict() if type(value) is dict:
            return {key: replaced(each, made) for key, each in value.items()}
    return value
