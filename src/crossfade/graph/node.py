"""What all nodes have: how their value should move, compiling, and errors for using a node as a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self
from weakref import WeakSet

from crossfade.graph.actors import ActorInfo
from crossfade.graph.communicators import Communicator
from crossfade.graph.hook import compiler
from crossfade.graph.movement import asked_transport, promised, target_device_of
from crossfade.graph.unread import Trace, next_order
from crossfade.types import TargetDevice

OF_GRAPHS = {
    name: name for name in ("execute", "execute_async", "plan", "statistics", "teardown", "timeline", "visualize")
} | {"get": "execute(...).get()"}
"""What compiled graphs have and nodes do not, and how to write it."""


class Node:
    """One value of a graph. Nodes are equal, and hash, by identity.

    All attributes begin with an underscore, so that every other name of an `InputNode` is a part of the input:

    - ``_order``: the position in the order of creation, which is topological: what a node uses was created before it.
    - ``_users``: the living calls, collectives and `MultiOutputNode`s that take this node.
    - ``_is_compiled``: compiling a graph with this node was at least tried.
    - ``_is_settled``: if it is dropped, it leaves no `graph.unread.Trace`: something has taken it, or an error has named it.
    - ``_trace``: the trace of a call that was made from this node, and was dropped without being read.
    - ``_transport``: how the value should move: a name, of which ``auto`` leaves it to crossfade, or a communicator.
    - ``_transport_to``: how it should move to some of its readers, by the id of the actor, where that differs.
    - ``_target_device``: where readers want the tensors in it.
    - ``_target_device_to``: the same for some of its readers, where that differs.
    - ``_static_shape``: the user promises that every execution's tensors have the same shapes and dtypes.
    - ``_direct_return``: the user promises that the value is a tensor itself.
    """

    def __init__(self) -> None:
        self._order = next_order()
        self._users: WeakSet[Node] = WeakSet()
        self._is_compiled = False
        self._is_settled = False
        self._trace: Trace | None = None
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
                that readers with a GPU want on it are the ones that come from a GPU. Parts of the input for which no device, or no
                transport, was set take it from the whole input.
            _static_shape: Ray's spelling of ``static_shape``.
            _direct_return: Ray's spelling of ``direct_return``.
            static_shape: every execution's tensors have the same shapes and dtypes; one that breaks this ends its execution in a
                `StaticShapeError`. It is promised of the value, for all its readers.
            direct_return: the value is a tensor itself and does not only contain tensors.
            reader: the actor that should get the value that way; the other readers get it as before. None means all readers.

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
        if reader is None or _static_shape or static_shape is not None:  # else the promise stays
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
        self._is_compiled = True
        if unnamed:
            raise TypeError(
                f"compile is given {unnamed[0]!r}\nhint: options go by name, such as compile(max_inflight=10)"
            )
        return compiler()(self, **options)

    def experimental_compile(self, *unnamed: Any, **options: Any) -> Any:
        """Ray's name for `compile`."""
        return self.compile(*unnamed, **options)

    def _take_to(self, user: Node) -> None:
        """Notes that another node takes this node."""
        self._users.add(user)
        self._is_settled = True

    def _sources(self) -> tuple[Node, ...]:
        """Returns the nodes that this one is directly made from."""
        return ()

    def _label(self) -> str:
        """Returns the node's name in messages and drawings."""
        return type(self).__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._label()})"

    if not TYPE_CHECKING:  # type checkers would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            """Called only for names that a node does not have."""
            if name in OF_GRAPHS:
                raise AttributeError(
                    f"{self._label()} is a node of a graph that is not compiled, and has no {name}\n"
                    f"hint: graph = node.compile(), then graph.{OF_GRAPHS[name]}"
                )
            return object.__getattribute__(self, name)  # raises Python's own error

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"{self._label()} stands for one value, which is not there yet, and cannot be iterated over or unpacked\n"
            "hint: a method that returns several values says so with num_returns; parts of the input are inp[0], inp.x"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self._label()} is a node of a graph and cannot be copied, pickled or sent to an actor\n"
            "hint: among the arguments of bind, nodes are found at the top level and in lists, tuples and dicts only"
        )


def _id_of(reader: Any) -> str:
    info = getattr(reader, "_info", reader)
    if not isinstance(info, ActorInfo):
        raise TypeError(f"{reader!r} is no actor\nhint: pass the handle that Cls.remote() returned")
    return info.id
