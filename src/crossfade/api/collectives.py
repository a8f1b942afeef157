"""What the user binds collectives with: ``allreduce.bind(nodes)`` and its like."""

from __future__ import annotations

from typing import Any

from crossfade.api.remote import ActorHandle
from crossfade.graph.collectives import bind_collective
from crossfade.types import CollectiveKind, ReduceOp


class AllReduce:
    """All actors get the reduction of all tensors."""

    def bind(self, nodes: Any, op: Any = ReduceOp.SUM, transport: Any = None) -> list[Any]:
        """Puts an all-reduce into the graph.

        Args:
            nodes: one node per actor, whose values are tensors of one shape and dtype; or one list per actor, all of the same
                length: tensor k of each actor is reduced with tensor k of the others, and tensors of one dtype travel together.
                Or, as in Ray, one list per tensor, with one node per actor.
            op: how: a `ReduceOp`, or its name.
            transport: ``gloo`` for CPU tensors; for GPU tensors ``copy`` (by copy engines), `Transport.NCCL`, or ``accelerator``
                (``"nccl"`` means it too), which chooses between these two; ``auto``, the default, chooses among all. Or a
                ``TorchTensorType`` that names one of them, or a `Communicator` whose group these actors are.

        Returns:
            A node for each actor; of lists, a list of nodes for each actor.

        Raises:
            GraphError: the nodes do not fit.
            UnknownTransport: there is no such transport.
            ValueError: there is no such reduction.
        """
        return bind_collective(CollectiveKind.ALLREDUCE, nodes, op=op, transport=transport)


class AllGather:
    """All actors get all tensors, one after the other along dim 0."""

    def bind(self, nodes: Any, transport: Any = None) -> list[Any]:
        """Puts an all-gather into the graph.

        Args:
            nodes: a node of each of the actors, giving tensors of one shape and dtype with at least one dimension.
            transport: as for an all-reduce.

        Returns:
            A node for each actor: the tensors in the order of ``nodes``.

        Raises:
            GraphError, UnknownTransport: as for an all-reduce.
        """
        return bind_collective(CollectiveKind.ALLGATHER, nodes, transport=transport)


class ReduceScatter:
    """Each gets its part of the reduction of all tensors."""

    def bind(self, nodes: Any, op: Any = ReduceOp.SUM, transport: Any = None) -> list[Any]:
        """Puts a reduce-scatter into the graph.

        Args:
            nodes: a node of each of n actors, giving tensors of one shape and dtype; n divides dim 0.
            op: how: a `ReduceOp`, or its name.
            transport: as for an all-reduce.

        Returns:
            A node for each actor: of the n equal parts of dim 0, number i for the actor of node i.

        Raises:
            GraphError, UnknownTransport, ValueError: as for an all-reduce.
        """
        return bind_collective(CollectiveKind.REDUCESCATTER, nodes, op=op, transport=transport)


class Broadcast:
    """All actors get the tensor of one of them."""

    def bind(self, nodes: Any, root: int = 0, transport: Any = None) -> list[Any]:
        """Puts a broadcast into the graph.

        Args:
            nodes: at position ``root`` a node that gives a tensor of any shape and dtype; at the others nodes, or the handles, of
                the other actors that get it. What those nodes give is not looked at, unless it is an exception.
            root: the position of the tensor.
            transport: as for an all-reduce.

        Returns:
            A node for each actor: a copy of the tensor.

        Raises:
            GraphError, UnknownTransport: as for an all-reduce.
        """
        if isinstance(nodes, list | tuple):
            nodes = [node._info if isinstance(node, ActorHandle) else node for node in nodes]
        return bind_collective(CollectiveKind.BROADCAST, nodes, root=root, transport=transport)
