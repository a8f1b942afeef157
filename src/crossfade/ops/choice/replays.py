"""Calls that come again with the same tensors are captured once and replayed: a launch instead of a hundred.

What a call by rounds enqueues costs the host more than many a product takes. On a GPU, and on a lane that can be replayed, the
second call with equal addresses, shapes and candidate is captured into a CUDA graph, and this and all later ones replay it. To the
other ranks a replayed call is like any other: it uses the same buffers and sets the same signals, so one rank may replay what
another enqueues. Addresses and torch's settings for products are the whole of what a graph knows, so a tensor that has taken the
place of a freed one is right as well. Work of the caller's that a call takes along (``Job.fill``) is not captured; it follows.

The graphs of a lane never run at the same time, and share one pool for what they need in between. So nothing that a caller keeps
may lie there: a captured call fills the output that it is given (``Job.is_new_out``). A call that is captured by its caller stays
as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.algorithms import fused
from crossfade.ops.calls.job import Job, Once
from crossfade.ops.choice.candidate import Candidate

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

MOST_CALLS = 512
"""Different calls that a lane remembers; the one that was not used for the longest time is forgotten. Every layer of a model has
weights of its own: 80 layers with two products each are 320 calls, forward and back."""

_REPLAYED = ("rounds", "tiles", "fused")
"""Not those that call NCCL: when a rank has died, torch ends what it enqueued itself, and not what a graph replays."""


def enqueue(candidate: Candidate, run: Callable[[Job], None], job: Job) -> None:
    """Does a call, by a replay where it can."""
    group = job.group
    if (
        group.device_type != "cuda"
        or candidate.name not in _REPLAYED
        or not group.lane(job.lane).is_replayable
        or group.is_capturing()
    ):
        run(job)
        return
    name = _name(job.lane)
    replays: _Replays | None = group.belongings.get(name)
    if replays is None:
        replays = group.belongings[name] = _Replays(group)
    replays.run((candidate, *_key(candidate, job)), run, job)


def is_replayed(group: PeerGroup) -> bool:
    """Whether calls of a group that come again are replayed."""
    return group.device_type == "cuda" and group.lane().is_replayable


def forget(group: PeerGroup, lane: int = 0) -> None:
    """Gives the graphs of a lane back, and their memory. Calls that come again are captured again."""
    replays: _Replays | None = group.belongings.get(_name(lane))
    if replays is not None:
        replays.forget()


def _name(lane: int) -> str:
    return f"crossfade.ops.choice.replays of lane {lane}"


def _key(candidate: Candidate, job: Job) -> tuple[object, ...]:
    """Equal ones mean equal graphs."""
    # What torch's fused operators share with the other ranks changes when it grows, for all of them at once.
    shared = fused.shared_bytes(job.group) if candidate.name == "fused" else 0
    places = map(_place, (job.a, job.b, job.bias, job.out, job.gathered))
    return (job.name, job.counts, job.has_bias, shared, *_settings(job.a.dtype), *places)


def _place(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _settings(dtype: torch.dtype) -> tuple[object, ...]:
    """What torch lets a program change of products of a type, at any time."""
    torch = torch_or_raise()
    cuda = torch.backends.cuda
    library = cuda.preferred_blas_library()
    if dtype == torch.bfloat16:
        return library, cuda.matmul.allow_bf16_reduced_precision_reduction
    if dtype == torch.float16:
        return library, cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_fp16_accumulation
    return library, cuda.matmul.fp32_precision


class _Replays:
    """The calls of one lane."""

    def __init__(self, group: PeerGroup) -> None:
        self._graphs: OrderedDict[tuple[object, ...], Any] = OrderedDict()  # None: seen once
        self._recorder = Recorder(group)
        self._pool: Any = None

    def run(self, key: tuple[object, ...], run: Callable[[Job], None], job: Job) -> None:
        """Replays a call, or captures it first, or does it, if it is the first of its kind."""
        graphs = self._graphs
        if key not in graphs:
            run(job)
            graphs[key] = None
            if len(graphs) > MOST_CALLS:
                graphs.popitem(last=False)
            return
        graphs.move_to_end(key)
        group = job.group
        lane = group.lane(job.lane)
        lane.check()
        try:
            graph = graphs[key]
            if graph is None:
                graph = graphs[key] = self._capture(run, job)
            lane.begin(group.current_stream())
            graph.replay()
        except BaseException as error:  # the other ranks do this call
            lane.cut_off(error)
            raise
        group.check_call(lane)

    def forget(self) -> None:
        """Gives all graphs back."""
        self._graphs.clear()

    def _capture(self, run: Callable[[Job], None], job: Job) -> Any:
        # torch gives a pool up with the last graph that used it: it cannot be captured into again.
        if self._pool is None or all(graph is None for graph in self._graphs.values()):
            self._pool = torch_or_raise().cuda.graph_pool_handle()
        pool, self._pool = self._pool, None  # nor can one whose capture failed
        graph = self._recorder.capture(partial(run, replace(job, fill=Once(None), is_new_out=False)), pool)
        self._pool = pool
        return graph


class Recorder:
    """Captures, one at a time, on one stream: torch keeps a workspace of cuBLAS for each stream that ever had a product."""

    def __init__(self, group: PeerGroup) -> None:
        self._cuda = torch_or_raise().cuda
        self._device = group.memory.driver.device
        self._stream: Any = self._cuda.Stream(self._device)

    def capture(self, work: Callable[[], object], pool: Any = None) -> Any:
        """A graph of what ``work`` enqueues on torch's current stream, which does not happen now. ``pool``: of memory that other
        graphs use too, none of which runs at the same time; None for a new one.
        """
        graph = self._cuda.CUDAGraph()
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(Exception):  # such as work that was not joined: it follows from the error
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
