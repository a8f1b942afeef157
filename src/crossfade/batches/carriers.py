"""How the bytes of a part's collectives move: by process groups of the part's own, or by copy engines.

A carrier starts a collective without waiting for it, and gives a *work*: its ``wait`` makes the current stream wait (on a CPU, the
caller). A part's groups are its own, since collectives of one group run in order: behind the other part's, which may not be ready.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from crossfade.peers import PeerGroup, open_group
from crossfade.peers.collectives import SUMMABLE, all_gather, all_reduce, all_to_all, reduce_scatter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Carrier", "CopyEngines", "ProcessGroups", "Work", "group_name", "own_stream"]

_inside: Any = dist.distributed_c10d
_cuda: Any = torch.cuda


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any: ...


class Carrier(Protocol):
    """Starts the collectives of all parts of a run."""

    def start(
        self,
        part: int,
        name: str,
        original: Callable[..., Any],
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Starts what a method of a process group does; gives its work."""
        ...

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        """Starts a functional collective; gives its outputs, and the work if torch does not keep it with them."""
        ...


_COPIES: WeakKeyDictionary[ProcessGroup, dict[tuple[int, int | None], str]] = WeakKeyDictionary()
"""The names of copies of groups, by part and blocks; all handles of a process share them. (Not the copies themselves: a group that
outlives destroy_process_group ends its threads when nobody expects it any more.)"""


class ProcessGroups:
    """Communicators of torch's own backend (NCCL, gloo). Part 0 has the module's own groups, the others have copies of them.

    Attributes:
        max_ctas: the most blocks that a kernel of NCCL may take; part 0 has copies too then. None for NCCL's choice.
    """

    def __init__(self, max_ctas: int | None = None) -> None:
        self.max_ctas = max_ctas

    def of_part(self, group: ProcessGroup, part: int) -> ProcessGroup:
        """The part's own copy of a group, which is made when it is first asked for. All ranks of the group ask in one order."""
        if (part == 0 and self.max_ctas is None) or group not in _inside._world.pg_map:
            return group
        names, kind = _COPIES.setdefault(group, {}), (part, self.max_ctas)
        with suppress(KeyError, RuntimeError, ValueError):  # not made yet, or destroyed
            return _inside._resolve_process_group(names[kind])  # type: ignore[no-any-return]
        made = self._copy(group)
        names[kind] = made.group_name
        return made

    def _copy(self, group: ProcessGroup) -> ProcessGroup:
        ranks, backend, options = dist.get_process_group_ranks(group), str(dist.get_backend(group)), None
        if self.max_ctas is not None and backend == "nccl":
            options = _inside.ProcessGroupNCCL.Options()
            options.config.max_ctas = self.max_ctas
        if _cuda.is_initialized():
            torch.cuda.synchronize()  # a communicator may be split off one that must have nothing to do then
        if backend not in ("nccl", "gloo"):  # one for each kind of device
            backend = str(_inside._world.pg_backend_config[group])
        made: Any = dist.new_group(ranks, backend=backend, pg_options=options, use_local_synchronization=True)
        # new_group sorts the ranks: where that changes a rank's number in the group, roots and parts would be others.
        return made if dist.get_process_group_ranks(made) == ranks else group  # type: ignore[no-any-return,unused-ignore]

    def start(
        self,
        part: int,
        name: str,
        original: Callable[..., Any],
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        for each in (*args, *kwargs.values()):
            if hasattr(each, "asyncOp"):
                each.asyncOp = True  # else NCCL would take the caller's stream, and gloo the caller's time
        return original(self.of_part(group, part), *args, **kwargs)

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        name = group_name(packet, args)
        if name is not None:
            own = self.of_part(_inside._resolve_process_group(name), part).group_name
            args = tuple(own if each is name else each for each in args)
        return packet(*args, **kwargs), None


def group_name(packet: Any, args: tuple[Any, ...]) -> Any:
    """The argument that names the group; None if it is not there, or is no name."""
    for argument, value in zip(packet.default._schema.arguments, args, strict=False):
        if argument.name == "group_name" and isinstance(value, str):
            return value
    return None


class CopyEngines:
    """Collectives of `crossfade.peers`, on a lane and a stream of each part; what those do not have goes by process groups.

    Sums, gathers and exchanges of equal parts, of whole tensors that need no gradient here.
    """

    def __init__(self, num_parts: int, otherwise: ProcessGroups) -> None:
        self._num_parts = num_parts
        self._otherwise = otherwise

    def open(self, group: ProcessGroup, device: torch.device) -> PeerGroup:
        """The shared buffers of a group, with a lane a part; all handles of a process share them. Collective when they are made."""
        place = group, self._num_parts
        if place not in _LANES:
            _LANES[place] = open_group(group, device=device, num_lanes=self._num_parts, is_replayable=True)
            atexit.unregister(_close_lanes)
            atexit.register(_close_lanes, os.getpid())
        return _LANES[place]

    def start(
        self,
        part: int,
        name: str,
        original: Callable[..., Any],
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        copied = _of_method(name, args)
        if copied is None:
            return self._otherwise.start(part, name, original, group, args, kwargs)
        return self._do(part, group, *copied)

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        name = group_name(packet, args)
        copied = None if name is None or kwargs else _of_packet(str(packet), args)
        if copied is None:
            return self._otherwise.start_packet(part, packet, args, kwargs)
        return copied[2], self._do(part, _inside._resolve_process_group(name), *copied)

    def _do(
        self, part: int, group: ProcessGroup, act: Callable[..., Any], source: torch.Tensor, out: torch.Tensor
    ) -> Work:
        peers = self.open(group, source.device)
        if source.device.type == "cpu":
            act(source, peers, out, lane=part)
            return _Done()
        stream = own_stream("copies", part)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            act(source, peers, out, lane=part)
            return _OnStream(stream.record_event(), (source, out))


_LANES: dict[tuple[ProcessGroup, int], PeerGroup] = {}


def _close_lanes(pid: int) -> None:
    """At the end of the process, and not in forks of it: the others may still read this rank's memory."""
    if os.getpid() == pid:
        while _LANES:
            with suppress(Exception):
                _LANES.popitem()[1].close()


@cache
def own_stream(use: str, part: int) -> torch.cuda.Stream:
    """A part's stream. All handles of a process share them: streams of a hardware queue wait for each other, and a GPU has few."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]


class _Done:
    """What a CPU does is done at once."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _OnStream:
    """Copies that have been enqueued. The tensors live until somebody has waited."""

    def __init__(self, event: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        self._event = event
        self._tensors = tensors

    def wait(self, *_: Any) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


_Copied = tuple[Callable[..., Any], torch.Tensor, torch.Tensor]


def _of_method(name: str, args: tuple[Any, ...]) -> _Copied | None:
    """The collective of `crossfade.peers` that does the same, what it reads and what it writes; None if there is none."""
    match name, args:
        case "allreduce", ([tensor], opts) if opts.reduceOp == dist.ReduceOp.SUM:
            return _fitting(all_reduce, tensor, tensor)
        case (("all_gather_single" | "_allgather_base"), (out, source, _)):
            return _flat(_fitting(all_gather, source, out))
        case (("reduce_scatter_single" | "_reduce_scatter_base"), (out, source, opts)) if (
            opts.reduceOp == dist.ReduceOp.SUM
        ):
            return _flat(_fitting(reduce_scatter, source, out))
        case (("all_to_all_single" | "alltoall_base"), (out, source, out_sizes, sizes, _)) if _are_equal(
            out_sizes, sizes
        ):
            return _flat(_fitting(all_to_all, source, out))
    return None


def _flat(copied: _Copied | None) -> _Copied | None:
    """The same in one dimension: an output of torch's methods may have other dimensions than that of `crossfade.peers`."""
    return None if copied is None else (copied[0], copied[1].view(-1), copied[2].view(-1))


def _of_packet(name: str, args: tuple[Any, ...]) -> _Copied | None:
    source = args[0]
    if not isinstance(source, torch.Tensor) or (source.requires_grad and torch.is_grad_enabled()) or not source.dim():
        return None
    match name.partition(".")[2], args[1:]:
        case "all_reduce", ("sum", _):
            return _fitting(all_reduce, source, torch.empty_like(source))
        case "all_gather_into_tensor", (num_ranks, _):
            return _fitting(all_gather, source, source.new_empty(source.shape[0] * num_ranks, *source.shape[1:]))
        case "reduce_scatter_tensor", ("sum", num_ranks, _):
            return _fitting(reduce_scatter, source, source.new_empty(source.shape[0] // num_ranks, *source.shape[1:]))
        case "all_to_all_single", (out_sizes, sizes, _) if _are_equal(out_sizes, sizes):
            return _fitting(all_to_all, source, torch.empty_like(source))
    return None


def _are_equal(out_sizes: Any, sizes: Any) -> bool:
    """Whether all parts that are exchanged have one length. (Empty: torch's word for that.)"""
    return len(set(out_sizes)) <= 1 and len(set(sizes)) <= 1


def _fitting(act: Callable[..., Any], source: torch.Tensor, out: torch.Tensor) -> _Copied | None:
    tensors = (source, out)
    if any(type(each) is not torch.Tensor and type(each) is not torch.nn.Parameter for each in tensors):
        return None
    if any(each.device.type not in ("cuda", "cpu") or not each.is_contiguous() or not each.numel() for each in tensors):
        return None
    if act in (all_reduce, reduce_scatter) and str(source.dtype).removeprefix("torch.") not in SUMMABLE:
        return None
    return act, source.detach(), out.detach()
