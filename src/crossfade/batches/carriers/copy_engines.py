"""Collectives of parts by copy engines, which take no multiprocessor: on a lane of `crossfade.peers` and a stream for each part."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from crossfade.batches.carriers.buffers import open_buffers
from crossfade.batches.carriers.carrier import MethodCall, Work, group_name
from crossfade.batches.carriers.equivalents import of_method, of_packet
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.interrupted import brief
from crossfade.peers import PeerGroup
from crossfade.peers.replays import Replays

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_inside: Any = dist.distributed_c10d
_cuda: Any = torch.cuda
_C: Any = torch._C


class CopyEngines:
    """Sums, gathers and exchanges of equal parts, of whole tensors that need no gradient here."""

    def __init__(self, num_parts: int, otherwise: ProcessGroups) -> None:
        self.num_not_replayed = 0
        self._num_parts = num_parts
        self._otherwise = otherwise

    def start(self, part: int, call: MethodCall) -> Any:
        copied = of_method(call.name, call.args)
        return self._otherwise.start(part, call) if copied is None else self._do(part, call.group, *copied)

    def start_packet(
        self, part: int, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Work | None]:
        name = group_name(packet, args, kwargs)
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
        work, was_ready = _track(part, source.device.index).enqueue(peers, act, source, out)
        self.num_not_replayed += not was_ready
        return work


@cache
def own_stream(use: str, part: int, device: int) -> torch.cuda.Stream:
    """A part's stream on a GPU. All handles share it: streams of a hardware queue wait for each other, and a GPU has few."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]


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

    def __init__(self, part: int, device: int) -> None:
        self._part = part
        self._stream: Any = own_stream("copies", part, device)
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
        name = f"crossfade.batches.carriers.copy_engines of lane {self._part}"
        found: Replays | None = peers.belongings.get(name)
        if found is None:
            found = peers.belongings[name] = Replays(peers, self._part)
        return found


@cache
def _track(part: int, device: int) -> _Track:
    return _Track(part, device)


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
    """Copies that have been enqueued. The tensors live until the first wait."""

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
        self._track.free.append(self._event)  # there is no work left that could wait for it


WORKS: tuple[Any, ...] = (dist.Work, _Done, _OnStream)
"""Kinds of works that a carrier gives."""
