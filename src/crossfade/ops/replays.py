"""Calls that come again with the same tensors are captured once and replayed: a launch instead of a hundred.

What a call by rounds enqueues costs the host more than many a product takes. On a GPU, and on a lane that can be replayed, the
second call with equal addresses, shapes and candidate is captured into a CUDA graph, and this and all later ones replay it. To the
other ranks a replayed call is like any other: it uses the same buffers and sets the same signals, so one rank may replay what
another enqueues. Addresses are the whole of what a graph knows, so a tensor that has taken the place of a freed one is right as
well. Work of the caller's that a call takes along (``Job.fill``) is not captured; it follows.

The graphs of a lane never run at the same time, and share one pool for what they need in between. A call that is captured by its
caller stays as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.candidate import Candidate
from crossfade.ops.job import Job, Once

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["MOST_CALLS", "enqueue"]

MOST_CALLS = 64
"""Different calls that a lane remembers; the one that was not used for the longest time is forgotten."""

_REPLAYED = ("rounds", "tiles", "chunked", "fused")  # plain is two launches


def enqueue(candidate: Candidate, way: Callable[[Job], None], job: Job) -> None:
    """Does a call, by a replay where it can.

    Args:
        candidate: which way it is.
        way: does it.
        job: the call.
    """
    group = job.group
    if (
        group.device_type != "cuda"
        or candidate.name not in _REPLAYED
        or not group.lane(job.lane).is_replayable
        or group.is_capturing()
    ):
        way(job)
        return
    name = f"replays of lane {job.lane}"
    replays: _Replays | None = group.belongings.get(name)
    if replays is None:
        replays = group.belongings[name] = _Replays(group)
    replays.run((candidate, *_key(job)), way, job)


def _key(job: Job) -> tuple[object, ...]:
    """Equal ones mean equal graphs."""
    return (job.name, job.counts, *map(_place, (job.a, job.b, job.bias, job.out, job.gathered)))


def _place(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


class _Replays:
    """The calls of one lane.

    Args:
        group: whose lane.
    """

    def __init__(self, group: PeerGroup) -> None:
        self._torch = torch_or_raise()
        self._graphs: OrderedDict[tuple[object, ...], Any] = OrderedDict()  # None: seen once
        self._stream: Any = self._torch.cuda.Stream(group.home.driver.device)
        self._pool = self._torch.cuda.graph_pool_handle()

    def run(self, key: tuple[object, ...], way: Callable[[Job], None], job: Job) -> None:
        """Replays a call, or captures it first, or does it, if it is the first of its kind."""
        graphs = self._graphs
        if key not in graphs:
            way(job)
            graphs[key] = None
            if len(graphs) > MOST_CALLS:
                graphs.popitem(last=False)
            return
        graphs.move_to_end(key)
        graph = graphs[key]
        if graph is None:
            graph = graphs[key] = self._capture(way, job)
        group = job.group
        lane = group.lane(job.lane)
        lane.begin(group.current_stream())
        graph.replay()
        group.check_call(lane)

    def _capture(self, way: Callable[[Job], None], job: Job) -> Any:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                way(replace(job, fill=Once(None)))
            finally:
                graph.capture_end()
        return graph
