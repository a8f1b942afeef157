"""Where a collective of an unmodified module is seen: the methods of torch's process groups, and its functional collectives.

Module functions, function modes and dispatch modes each miss some: names that a library imported, what DTensor sends inside an
operator. All come through the two places here. Methods are replaced on the class ``ProcessGroup``, functional collectives in
the namespaces of ``torch.ops``; so are the ``wait`` of works, for collectives that the module itself waits for, the ``forward`` of
modules that need a look (DDP, batch norms), what calls the operators of `crossfade.ops`, and the calls of torch's operators and
scripts, which are counted. The replacements are in place while something is interleaved and at no other time, and ask first
whether this is a part's call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import _ops
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from crossfade.batches.carriers.copy_engines import WORKS

_C: Any = torch._C
_NAMES = (
    "allreduce allreduce_coalesced allgather all_gather_single _allgather_base allgather_coalesced all_gather_single_coalesced "
    "allgather_into_tensor_coalesced reduce_scatter reduce_scatter_single _reduce_scatter_base reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced all_to_all_single alltoall_base alltoall broadcast reduce gather scatter "
    "_start_coalescing _end_coalescing"
)
METHODS = tuple(_NAMES.split())
"""Methods of process groups, under the names of all versions of torch that are supported."""
PACKETS = {
    "_c10d_functional": "all_reduce all_reduce_ all_reduce_coalesced all_gather_into_tensor all_gather_into_tensor_coalesced "
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced all_to_all_single broadcast",
    "_c10d_functional_autograd": "all_gather_into_tensor reduce_scatter_tensor all_to_all_single",
    "_dtensor": "shard_dim_alltoall",
}
"""Operators by their namespace."""
_OPERATORS = (
    (_ops.OpOverloadPacket, "__call__"),
    (_ops.OpOverload, "__call__"),
    (_ops.OpOverload, "redispatch"),
    (_ops.TorchBindOpOverload, "__call__"),
    (_ops.HigherOrderOperator, "__call__"),
    (_C.ScriptFunction, "__call__"),
    (_C.ScriptMethod, "__call__"),
)
"""Where Python goes into C++ by pybind, under which no greenlet may be switched: from there it may come back into Python."""
_MODULES = (DistributedDataParallel, _BatchNorm, torch.nn.SyncBatchNorm)


class Part(Protocol):
    """What a replacement calls, if the caller is a part that listens.

    Attributes:
        num_operators: how many calls of ``torch.ops`` it is inside.
    """

    num_operators: int

    def on_method(
        self, name: str, original: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any: ...

    def on_wait(self, original: Callable[..., Any], work: Any, args: tuple[Any, ...], kwargs: Any) -> Any: ...

    def on_packet(self, packet: Any, args: tuple[Any, ...], kwargs: Any) -> Any: ...

    def on_module(self, module: torch.nn.Module, output: Any) -> None: ...

    def on_operator(self, operator: Callable[[], Any]) -> Any: ...


Find = Callable[[], Part | None]


class _Replacement(NamedTuple):
    owner: Any
    name: str
    attributes: Mapping[str, Any]  # the owner's own, as they are at any time
    original: Any
    function: Any


class _Installed:
    """Puts the replacements in place when the first user comes, and takes them away when the last one goes.

    What an interrupt in either leaves behind does no more than what it replaces, and is taken away before the next user.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._users = WeakSet[object]()
        self._replacements: list[_Replacement] = []
        self._made_for: object = None

    def enter(self, user: object, find: Find) -> None:
        with self._lock:
            if not self._users:
                self._take_away()
                self._make(find)
                for owner, name, _, _, function in self._replacements:
                    setattr(owner, name, function)
            self._users.add(user)

    def leave(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._take_away()

    def _take_away(self) -> None:
        for owner, name, attributes, original, function in self._replacements:
            if attributes.get(name) is function:
                setattr(owner, name, original)

    def _make(self, find: Find) -> None:
        """Those of the last time, unless somebody has replaced something there since, or there is more to replace."""
        modules = [sys.modules.get(name) for name in _OWN_MODULES]
        for _, name, attributes, original, _ in self._replacements:
            if attributes.get(name) is not original:
                break
        else:
            if self._made_for == (find, *modules):
                return
        self._replacements, self._made_for = list(_replacements(find, *modules)), (find, *modules)


_OWN_MODULES = "crossfade.p2p.backend", "crossfade.ops.operators"


def _replacements(find: Find, transfers: Any, operators: Any) -> Iterator[_Replacement]:
    """``transfers``, ``operators``: modules of crossfade, if they are loaded."""

    def replacement(owner: Any, name: str, make: Callable[[Any, Find], Any]) -> _Replacement:
        # From the owner's own dictionary: getattr gives something that cannot be put back.
        return _Replacement(owner, name, vars(owner), vars(owner)[name], make(getattr(owner, name), find))

    # Groups of `crossfade.p2p.backend` have methods of their own, which call those of a group that torch does not know.
    groups = [dist.ProcessGroup, *([transfers.CrossfadeGroup] if hasattr(transfers, "CrossfadeGroup") else [])]
    for group in groups:
        for name in METHODS:
            if name in vars(group):
                yield replacement(group, name, partial(_method, name))
    for namespace, names in PACKETS.items():
        packets = getattr(torch.ops, namespace)
        for name in names.split():
            if hasattr(packets, name):
                yield replacement(packets, name, _packet)
    for kind, name in _OPERATORS:
        yield replacement(kind, name, _operator)
    for work in WORKS:
        yield replacement(work, "wait", _wait)
    for module in _MODULES:
        yield replacement(module, "forward", _forward)
    if operators is not None:
        yield replacement(operators, "around", _fused)


installed = _Installed()
"""The one of this process: classes are replaced for all threads."""


def _method(name: str, original: Callable[..., Any], find: Find) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or (part := find()) is None
            or group not in dist.distributed_c10d._world.pg_map
        ):
            return original(group, *args, **kwargs)
        return part.on_method(name, original, group, args, kwargs)

    return call


def _wait(original: Callable[..., Any], find: Find) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (part := find()) is None:
            return original(work, *args, **kwargs)
        return part.on_wait(original, work, args, kwargs)

    return wait


def _packet(packet: Any, find: Find) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (part := find()) is None:
            return packet(*args, **kwargs)
        return part.on_packet(packet, args, kwargs)

    for overload in packet.overloads():
        setattr(call, overload, getattr(packet, overload))
    return call


def _operator(original: Callable[..., Any], find: Find) -> Callable[..., Any]:
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (part := find()) is None:
            return original(self, *args, **kwargs)
        part.num_operators += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            part.num_operators -= 1

    return call


def _fused(_: Any, find: Find) -> Callable[..., Any]:
    def around(operator: Callable[[], Any]) -> Any:
        part = find()
        return operator() if part is None else part.on_operator(operator)

    return around


def _forward(original: Callable[..., Any], find: Find) -> Callable[..., Any]:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and (part := find()) is not None:
            part.on_module(self, output)
        return output

    return forward
