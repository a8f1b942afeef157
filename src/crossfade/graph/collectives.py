"""Collectives: what several actors do together with a tensor of each, as nodes of a graph.

``allreduce.bind([a.grad.bind(x), b.grad.bind(x)])`` makes one `CollectiveNode`, which the user never sees, and gives a
`CollectiveOutput` for each actor: what that actor gets. Outputs are used like any other node.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from crossfade.errors import GraphError, UnknownTransport
from crossfade.graph.communicators import Communicator
from crossfade.graph.movement import asked_transport
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
    leave_if_unread,
    settle,
)
from crossfade.graph.type_hints import TorchTensorType
from crossfade.hints import nearest
from crossfade.interrupted import brief
from crossfade.types import CollectiveKind, ReduceOp, Transport

TRANSPORTS = (Transport.AUTO, Transport.GLOO, Transport.COPY, Transport.ACCELERATOR, Transport.NCCL)
MAX_SHOWN_ACTORS = 4

Member = Node | ActorInfo
"""What one actor brings: a tensor, or only itself (to a broadcast)."""


class CollectiveNode(Node):
    """What several actors do together; its values are its ``outputs``."""

    inputs: tuple[Node, ...] = ()  # see `MethodNode.inputs`
    # the values that the actors get, by rank, then by position: for each rank as many as the root or each party brings.
    outputs: tuple[CollectiveOutput, ...] = ()

    def __init__(
        self,
        kind: CollectiveKind,
        op: ReduceOp | None,
        root: int,
        parties: Sequence[ActorInfo],
        members: Sequence[Sequence[Node]],
    ) -> None:
        super().__init__()
        self.kind = kind
        self.op = op  # how tensors are reduced, for kinds that reduce
        self.root = root  # the rank whose tensor a broadcast gives to all
        self.parties = tuple(parties)  # the actors, in rank order, each once
        # for each rank the nodes whose tensors it brings: the same number for all, or for a broadcast none but the root's.
        self.members = tuple(map(tuple, members))
        self.inputs = tuple(dict.fromkeys(node for nodes in members for node in nodes))
        num_values = len(self.members[root])
        self.outputs = tuple(
            CollectiveOutput(self, rank, index) for rank in range(len(parties)) for index in range(num_values)
        )
        for node in self.inputs:
            node._take_to(self)

    @brief
    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():  # see `MethodNode.__del__`
            leave_if_unread(self, self.outputs)

    def outputs_at(self, rank: int) -> tuple[CollectiveOutput, ...]:
        """What one actor gets."""
        return tuple(output for output in self.outputs if output.rank == rank)

    def _sources(self) -> tuple[Node, ...]:
        return self.inputs

    def _label(self) -> str:
        shown = [actor.id for actor in self.parties[:MAX_SHOWN_ACTORS]]
        more = ["..."] if len(self.parties) > MAX_SHOWN_ACTORS else []
        return f"{self.kind}({', '.join([*shown, *more])})"


class CollectiveOutput(Node):
    """What one actor gets from a collective."""

    def __init__(self, parent: CollectiveNode, rank: int, index: int) -> None:
        super().__init__()
        self.parent = parent
        self.rank = rank  # the actor's place in it
        self.index = index  # which of the actor's tensors, where it brings several

    @property
    def actor(self) -> ActorInfo:
        """Where the value is."""
        return self.parent.parties[self.rank]

    def _sources(self) -> tuple[Node, ...]:
        return (self.parent,)

    def _label(self) -> str:
        which = f"[{self.index}]" if len(self.parent.members[self.parent.root]) > 1 else ""
        return f"{label_of(self.parent)}[{self.actor.id}]{which}"


def bind_collective(
    kind: CollectiveKind, nodes: Any, *, op: Any = ReduceOp.SUM, root: int = 0, transport: Any = None
) -> list[Any]:
    """Puts a collective into the graph. Returns a node for each actor, or a list of nodes where several tensors were given.

    ``nodes`` has a node of each actor, in rank order; for an allreduce also a list for each actor, or (as in Ray) a list for each
    tensor; for a broadcast others than the root may be given as `ActorInfo`. ``root`` is a position in ``nodes``. Of a
    `TorchTensorType` only the transport counts.
    """
    try:
        collective, gives_lists = _made(kind, nodes, op, root, transport)
    except (ValueError, TypeError):
        settle(nodes)
        raise
    outputs = [list(collective.outputs_at(rank)) for rank in range(len(collective.parties))]
    return outputs if gives_lists else [output for (output,) in outputs]


def _made(kind: CollectiveKind, nodes: Any, op: Any, root: Any, transport: Any) -> tuple[CollectiveNode, bool]:
    """Makes the collective. Returns it, and whether its results are to be returned as lists."""
    reduction = _reduction(kind, op) if kind.reduces else None
    asked = _checked_transport(kind, transport)
    if not isinstance(nodes, list | tuple):
        raise GraphError(
            f"{kind}.bind is given a {type(nodes).__name__}, no list of nodes",
            hint=f"list a node of each actor: {kind}.bind([a.method.bind(...), b.method.bind(...)])",
        )
    is_nested = any(isinstance(item, list | tuple) for item in nodes)
    rows, gives_lists = _rows_of(kind, nodes) if is_nested else ([[item] for item in nodes], False)
    _check_root(kind, root, rows)
    owners = [
        [_actor_of(kind, item, may_be_actor=_is_guest(kind, rank, root)) for item in row]
        for rank, row in enumerate(rows)
    ]
    _check_actors(kind, rows, owners)
    members = [[item for item in row if isinstance(item, Node)] for row in rows]
    collective = CollectiveNode(kind, reduction, root, [row[0] for row in owners], members)
    collective._transport = asked
    return collective, gives_lists


def _is_guest(kind: CollectiveKind, rank: int, root: int) -> bool:
    return kind is CollectiveKind.BROADCAST and rank != root


def _reduction(kind: CollectiveKind, op: Any) -> ReduceOp:
    name = op.name if isinstance(op, Enum) else op
    if isinstance(name, str) and name.lower() in set(ReduceOp):
        return ReduceOp(name.lower())
    names = [each.name for each in ReduceOp]
    hint = nearest(str(name).upper(), names, f"the reductions are {', '.join(names)}")
    raise ValueError(f"{kind}.bind: there is no reduction {op!r}\nhint: {hint}")


def _checked_transport(kind: CollectiveKind, transport: Any) -> str | Communicator:
    if transport is None:
        return Transport.AUTO
    if isinstance(transport, TorchTensorType):
        transport = transport.transport
    if not isinstance(transport, str | Communicator):
        raise TypeError(
            f"{kind}.bind: {transport!r} is not the name of a transport\nhint: leave it out, or write transport='gloo', or pass a "
            "Communicator"
        )
    asked = asked_transport(transport, by_cpu=Transport.GLOO)
    if isinstance(asked, str) and asked not in set(TRANSPORTS):
        raise UnknownTransport(
            f"{kind}.bind asks for the transport {transport!r}; there is no such way for tensors of several actors",
            hint=f"leave it out; the transports of collectives are {', '.join(TRANSPORTS)}",
        )
    return asked


def _rows_of(kind: CollectiveKind, nodes: Sequence[Any]) -> tuple[list[list[Any]], bool]:
    """What was given as lists of lists as one list for each actor; whether the result is given back as lists too."""
    if kind is not CollectiveKind.ALLREDUCE:
        raise GraphError(
            f"{kind}.bind is given lists in a list; only allreduce takes several tensors of each actor at once",
            hint=f"bind one {kind} for each tensor",
        )
    for index, row in enumerate(nodes):
        if not isinstance(row, list | tuple) or not row:
            what = "an empty list" if row in ([], ()) else describe(row) if isinstance(row, Node) else repr(row)
            raise GraphError(
                f"{kind}.bind: item {index} is {what}, where others are lists of nodes",
                hint="give a list of nodes, or for each actor a list of its nodes",
            )
    rows = [list(row) for row in nodes]
    owners = [{_actor_of(kind, item).id for item in row} for row in rows]
    by_actor = all(len(each) == 1 for each in owners) and len(set().union(*owners)) == len(rows)
    _check_lengths(kind, rows)
    if by_actor:
        return rows, True
    transposed = [list(column) for column in zip(*rows, strict=True)]
    for rank, column in enumerate(transposed):
        if len({_actor_of(kind, item).id for item in column}) > 1:
            raise GraphError(
                f"{kind}.bind: number {rank} of each list is {', '.join(map(describe, column))}, on different actors",
                hint="give a list for each actor, or lists with the actors in one order",
            )
    return transposed, len(rows) > 1


def _check_lengths(kind: CollectiveKind, rows: Sequence[Sequence[Any]]) -> None:
    for index, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise GraphError(
                f"{kind}.bind: the list of {describe(rows[0][0])} has {len(rows[0])} nodes, that of {describe(row[0])} "
                f"(item {index}) has {len(row)}",
                hint="all lists have the same length: tensor k of each actor is reduced with tensor k of the others",
            )


def _check_root(kind: CollectiveKind, root: Any, rows: Sequence[object]) -> None:
    if isinstance(root, bool) or not isinstance(root, int) or not (root == 0 or 0 <= root < len(rows)):
        raise GraphError(
            f"{kind}.bind: root={root!r} is no position in a list of {len(rows)} nodes",
            hint="root is the position of the node whose tensor is given to all, counted from 0",
        )


def _actor_of(kind: CollectiveKind, item: Any, *, may_be_actor: bool = False) -> ActorInfo:
    match item:
        case ActorInfo() if may_be_actor:
            return item
        case MethodNode() | CollectiveOutput():
            return item.actor
        case OutputNode():
            return item.parent.actor
        case InputNode() | InputPart():
            problem = f"{label_of(item)}, the driver's input, and the driver takes no part in collectives"
            hint = "pass it through a method of an actor first"
        case MultiOutputNode():
            problem = "a MultiOutputNode, which is the output of a graph and no value"
            hint = "pass a list of its nodes"
        case ActorInfo():
            problem = f"the actor {item.id}, which brings no tensor"
            hint = "bind one of its methods; only a broadcast takes an actor itself, in another place than the root's"
        case _:
            problem = f"a {type(item).__name__} and no node"
            hint = "list what method.bind(...) returned"
    raise GraphError(f"{kind}.bind: among the nodes is {problem}", hint=hint)


def _check_actors(
    kind: CollectiveKind, rows: Sequence[Sequence[Member]], owners: Sequence[Sequence[ActorInfo]]
) -> None:
    first: dict[str, Member] = {}
    for row, actors in zip(rows, owners, strict=True):
        actor = actors[0].id
        if actor in first:
            raise GraphError(
                f"{kind}.bind: {_shown(first[actor])} and {_shown(row[0])} are both on the actor {actor}",
                hint="give one node of each actor; for several tensors of an actor: allreduce.bind([[a1, a2], [b1, b2]])",
            )
        first[actor] = row[0]
    if not rows:
        raise GraphError(f"{kind}.bind is given no nodes", hint="a collective takes a node of each of its actors")


def _shown(member: Member) -> str:
    return member.id if isinstance(member, ActorInfo) else describe(member)
