"""User-defined communicators, which move tensors: a transport of edges and collectives."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

TorchTensorAllocator: TypeAlias = Callable[[tuple[int, ...], Any], Any]
"""Makes a new tensor from (shape, dtype)."""


class Communicator(ABC):
    """The base class for a user's own way to move tensors between actors. It has the methods of Ray's ``Communicator``.

    Pass one as a transport: ``node.with_tensor_transport(transport=communicator)``, and likewise to ``allreduce.bind``; crossfade
    never chooses one by itself. When the graph is compiled, each actor of the group gets a copy, by pickle. There all methods are
    called on the actor's main thread, where the actor's own methods run. An error that they raise ends the graph, not the actor:
    how far the other actors have come cannot be known.

    Calls block. So that no two calls wait for each other, all actors make theirs in one order, which is proved when the graph is
    compiled, and an actor calls `send`, `recv` or a collective only if all actors that it needs are in that call, or about to be.
    """

    @abstractmethod
    def initialize(self, rank: int) -> None:
        """Called first in each actor of the group, when a graph is compiled. It may wait until all actors have called it."""

    @abstractmethod
    def get_actor_handles(self) -> list[Any]:
        """Returns the handles of the actors of the group. Called in the driver. In actors, handles can only be compared."""

    @abstractmethod
    def get_rank(self, actor: Any) -> int:
        """Returns the rank of an actor of the group, given its handle: 0 to n - 1. Called in the driver."""

    @abstractmethod
    def get_self_rank(self) -> int | None:
        """Returns the rank that `initialize` was given. Not called by crossfade."""

    def get_world_size(self) -> int:
        """Returns the number of actors in the group. Not called by crossfade."""
        return len(self.get_actor_handles())

    @abstractmethod
    def send(self, value: Any, peer_rank: int) -> None:
        """Sends a tensor. Called for each tensor of a value that has any elements, in order; the peer calls `recv` for each.

        Args:
            value: a contiguous tensor on the actor's device: its GPU, or the CPU if it has none. It may still be read by others
                afterwards, and must not be changed.
            peer_rank: the rank of the actor that receives.
        """

    @abstractmethod
    def recv(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        peer_rank: int,
        allocator: TorchTensorAllocator | None = None,
    ) -> Any:
        """Receives a tensor, and returns it once it may be used.

        Args:
            shape: the shape of the tensor.
            dtype: the dtype of the tensor.
            peer_rank: the rank of the actor that sends.
            allocator: makes a tensor of a shape and a dtype on this actor's device, to receive into.
        """

    @property
    @abstractmethod
    def recv_stream(self) -> Any:
        """A stream for receiving. Not used by crossfade."""

    @property
    @abstractmethod
    def send_stream(self) -> Any:
        """A stream for sending. Not used by crossfade."""

    @abstractmethod
    def allgather(self, send_buf: Any, recv_buf: Any) -> None:
        """Gathers the tensors of all ranks, concatenated along dim 0 in the order of the ranks.

        Args:
            send_buf: this actor's tensor.
            recv_buf: the tensor to write the result to. The shapes fit at all actors: that was checked before the call.
        """

    @abstractmethod
    def allreduce(self, send_buf: Any, recv_buf: Any, op: Any) -> None:
        """Reduces the tensors of all ranks. If each rank has several, this is called for one after the other.

        Args:
            send_buf: this actor's tensor.
            recv_buf: the tensor to write the result to.
            op: a `ReduceOp`.
        """

    @abstractmethod
    def reducescatter(self, send_buf: Any, recv_buf: Any, op: Any) -> None:
        """Reduces the tensors of all ranks; rank r of n gets part r of the result along dim 0. Arguments as for `allreduce`."""

    @abstractmethod
    def destroy(self) -> None:
        """Called last in each actor, when the graph is torn down, if `initialize` has returned."""

    @abstractmethod
    def get_transport_name(self) -> str:
        """Returns the kind of communicator, such as ``cpu``. Not called by crossfade."""

    @classmethod
    @abstractmethod
    def generate_communicator_id(cls) -> str:
        """Returns a unique id. Not called by crossfade."""


class CPUCommunicator(Communicator):
    """Stands for the transport ``gloo``, which moves CPU tensors and blocks no actor: the methods here move nothing themselves."""

    def __init__(self, world_size: int, actor_handles: list[Any]) -> None:
        self._world_size = world_size
        self._actor_handles = list(actor_handles)
        self._rank: int | None = None

    def initialize(self, rank: int) -> None:
        """Notes the rank."""
        self._rank = rank

    def get_actor_handles(self) -> list[Any]:
        """Returns the handles as they were passed."""
        return self._actor_handles

    def get_rank(self, actor: Any) -> int:
        """Returns the position of the handle."""
        return self._actor_handles.index(actor)

    def get_self_rank(self) -> int | None:
        """Returns the rank that `initialize` was given."""
        return self._rank

    def get_world_size(self) -> int:
        """Returns the number of actors as it was passed."""
        return self._world_size

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "a CPUCommunicator moves nothing itself\nhint: pass it as a transport, which means 'gloo'"
        )

    send = recv = allgather = allreduce = reducescatter = _refuse
    recv_stream = send_stream = property(_refuse)

    def destroy(self) -> None:
        """Nothing to do."""

    def get_transport_name(self) -> str:
        """Returns ``cpu``, as in Ray."""
        return "cpu"

    @classmethod
    def generate_communicator_id(cls) -> str:
        """Returns a random id."""
        return str(uuid.uuid4())
