"""How the bytes of a part's collectives move: by process groups of the part's own, or by copy engines.

A carrier starts a collective without waiting for it, and gives a *work*: its ``wait`` makes the current stream wait (on a CPU, the
caller). A part's groups are its own, since collectives of one group run in order: behind the other part's, which may not be ready.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from crossfade.batches.buffers import open_buffers
from crossfade.batches.equivalents import of_method, of_packet
from crossfade.interrupted import brief
from crossfade.peers import PeerGroup
from crossfade.peers.replays import Replays

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_inside: Any = dist.distributed_c10d
_cuda: Any = torch.cuda
_C: Any = torch._C


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any: ...


class Carrier(Protocol):
    """Starts the collectives of all parts of a run.

    Attributes:
        num_not_replayed: how many collectives were not replays of a captured graph, where there are such.
    """

    num_not_replayed: int

    def start(
        self,
        part: int,
        name: str,
        original: Callable[..., Any],
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Any,
    ) -> Any:
        """Starts what a method of a process group does; gives its work. ``options``: those among the arguments."""
        ...

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        """Starts a functional collective; gives its outputs, and the work if torch does not keep it with them."""
        ...


_COPIES: WeakKeyDictionary[ProcessGroup, dict[tuple[int, int | None], ref[ProcessGroup]]] = WeakKeyDictionary()
"""Copies of groups, by part and blocks; all handles of a process share them. torch keeps them: a group that outlives
destroy_process_group ends its threads when nobody expects it any more."""


_NAMING = threading.Lock()
_NUMBERS: dict[tuple[int, ...], Iterator[int]] = {}
"""Of copies of groups of these ranks, which make them in one order; they go on where a group is made anew over its old store."""


@contextmanager
def _named(name: str) -> Iterator[None]:
    """A group that is made inside has this name. torch's own counts the groups that a rank is in: ranks that are in others beside
    this one would wait for each other under two names.
    """
    with _NAMING:
        before, thread = _inside._process_group_name, threading.get_ident()
        _inside._process_group_name = lambda *args, **kwargs: (
            name if threading.get_ident() == thread else before(*args, **kwargs)
        )
        try:
            yield
        finally:
            _inside._process_group_name = before


def options_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The options of a collective among the arguments of its method, or None."""
    if args and hasattr(args[-1], "asyncOp"):
        return args[-1]
    return next((each for each in (*args, *kwargs.values()) if hasattr(each, "asyncOp")), None)


class ProcessGroups:
    """Communicators of torch's own backend (NCCL, gloo). Part 0 has the module's own groups, the others have copies of them.

    Attributes:
        max_ctas: the most blocks that a kernel of NCCL may take; part 0 has copies too then. None for NCCL's choice.
    """

    num_not_replayed = 0

    def __init__(self, max_ctas: int | None = None) -> None:
        self.max_ctas = max_ctas

    def of_part(self, group: ProcessGroup, part: int) -> ProcessGroup:
        """The part's own copy of a group, which is made when it is first asked for. All ranks of the group ask in one order."""
        if part == 0 and self.max_ctas is None:
            return group
        kind = part, self.max_ctas
        copies = _COPIES.get(group)
        known = copies.get(kind) if copies is not None else None
        copy = known() if known is not None else None
        if copy is not None:
            return copy
        if group not in _inside._world.pg_map:
            return group
        copy = self._copy(group)
        _COPIES.setdefault(group, {})[kind] = ref(copy)
        return copy

    def _copy(self, group: ProcessGroup) -> ProcessGroup:
        ranks, backend, options = dist.get_process_group_ranks(group), str(dist.get_backend(group)), None
        limit = _timeout_of(group)
        if self.max_ctas is not None and backend == "nccl":
            options = _inside.ProcessGroupNCCL.Options()
            options.config.max_ctas = self.max_ctas
            options._timeout = limit or options._timeout
        if _cuda.is_initialized():
            torch.cuda.synchronize()  # a communicator may be split off one that must have nothing to do then
        if backend not in ("nccl", "gloo"):  # one for each kind of device
            backend = str(_inside._world.pg_backend_config[group])
        number = next(_NUMBERS.setdefault(tuple(ranks), itertools.count()))
        with _named(f"crossfade {group.group_name} {number}"):
            made: Any = dist.new_group(ranks, limit, backend, pg_options=options, use_local_synchronization=True)
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
        options: Any,
    ) -> Any:
        if options is not None:
            options.asyncOp = True  # else NCCL would take the caller's stream, and gloo the caller's time
        return original(self.of_part(group, part), *args, **kwargs)

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        name = group_name(packet, args)
        if name is not None:
            own = self.of_part(_inside._resolve_process_group(name), part).group_name
            args = tuple(own if each is name else each for each in args)
        return packet(*args, **kwargs), None


def _timeout_of(group: Any) -> Any:
    """How long its collectives may take; None where it does not say."""
    with suppress(AttributeError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout
    return None


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
        self.num_not_replayed = 0
        self._num_parts = num_parts
        self._otherwise = otherwise

    def start(
        self,
        part: int,
        name: str,
        original: Callable[..., Any],
        group: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Any,
    ) -> Any:
        copied = of_method(name, args)
        if copied is None:
            return self._otherwise.start(part, name, original, group, args, kwargs, options)
        return self._do(part, group, *copied)

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        name = group_name(packet, args)
        copied = None if name is None or kwargs else of_packet(str(packet), args)
        if copied is None:
            return self._otherwise.start_packet(part, packet, args, kwargs)
        return copied[2], self._do(part, _inside._resolve_process_group(name), *copied)

    def _do(
        self, part: int, group: ProcessGroup, act: Callable[..., Any], source: torch.Tensor, out: torch.Tensor
    ) -> Work:
        peers = open_buffers(group, source.device, self._num_parts, source.nbytes)
        if source.device.type == "cpu":
            act(source, peers, out, lane=part)
            return _Done(out)
        work, was_ready = _track(part).enqueue(peers, act, source, out)
        self.num_not_replayed += not was_ready
        return work


@cache
def own_stream(use: str, part: int) -> torch.cuda.Stream:
    """A part's stream. All handles of a process share them: streams of a hardware queue wait for each other, and a GPU has few."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]


class _Done:
    """What a CPU does is done at once."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return _future_of(self._out)


def _future_of(out: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
    """As torch's works have it, on this thread's stream."""
    future: torch.futures.Future[list[torch.Tensor]]
    future = torch.futures.Future(devices=[out.device] if out.is_cuda else None)
    future.set_result([out])
    return future


class _Track:
    """Where a part's copies are enqueued: a stream, events that are used again and again, and calls that come again.

    A call enqueues a dozen operations. It is captured when it comes again with the same tensors, as a model's calls do, and costs
    the host one launch from then on.
    """

    def __init__(self, part: int) -> None:
        self._part = part
        self._stream: Any = own_stream("copies", part)
        self._place = _place_of(self._stream)
        self.device = self._place[1]
        self._begin = _cuda.Event()
        self.free: list[Any] = []

    def enqueue(
        self, peers: PeerGroup, act: Callable[..., Any], source: torch.Tensor, out: torch.Tensor
    ) -> tuple[Work, bool]:
        """The work, and whether it only had to be replayed."""
        was_ready = True
        caller = _C._cuda_getCurrentStream(self.device)
        self._begin.record(_stream_at(caller))
        self._stream.wait_event(self._begin)
        _set_stream(self._place)
        try:
            call = partial(act, source, peers, out, lane=self._part)
            if _C._cuda_isCurrentStreamCapturing():
                call()
            else:
                places = source.data_ptr(), out.data_ptr()
                key = (act, *places, source.shape, source.dtype)
                was_ready = self._replays(peers).run(key, dict.fromkeys(places), call)
            event = self.free.pop() if self.free else _cuda.Event()
            event.record(self._stream)
        finally:
            _set_stream(caller)
        return _OnStream(self, event, (source, out)), was_ready

    def _replays(self, peers: PeerGroup) -> Replays:
        name = f"crossfade.batches.carriers of lane {self._part}"
        found: Replays | None = peers.belongings.get(name)
        if found is None:
            found = peers.belongings[name] = Replays(peers, self._part)
        return found


@cache
def _track(part: int) -> _Track:
    return _Track(part)


_Place = tuple[int, int, int]
"""What torch knows a stream by: its number, and its device's number and kind."""


def _place_of(stream: Any) -> _Place:
    return stream.stream_id, stream.device_index, stream.device_type


@cache
def _stream_at(place: _Place) -> Any:
    """The stream's object. torch makes one each time that it is asked for the current stream, which takes longer than an event."""
    number, device, kind = place
    return _cuda.Stream(stream_id=number, device_index=device, device_type=kind)


def _set_stream(place: _Place) -> None:
    number, device, kind = place
    _C._cuda_setStream(stream_id=number, device_index=device, device_type=kind)


class _OnStream:
    """Copies that have been enqueued. The tensors live until somebody has waited."""

    def __init__(self, track: _Track, event: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        self._track = track
        self._event = event
        self._tensors = tensors
        self._out = tensors[-1]

    def wait(self, *_: Any) -> bool:
        _stream_at(_C._cuda_getCurrentStream(self._track.device)).wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """This thread's stream waits for it."""
        self.wait()
        return _future_of(self._out)

    @brief
    def __del__(self) -> None:
        self._track.free.append(self._event)  # nobody can wait for it any more


WORKS: tuple[Any, ...] = (dist.Work, _Done, _OnStream)
"""Kinds of works that a carrier gives."""
