"""Calls that come again with the same tensors are captured once and replayed: a launch instead of many.

What a call enqueues can cost the host more than the GPU takes. The second call with an equal key is captured into a CUDA graph, and
this and all later ones replay it. To the other ranks a replayed call is like any other: it uses the same buffers and sets the same
signals, so one rank may replay what another enqueues. A key has all that a graph knows, such as addresses; a tensor that has taken
the place of a freed one is right as well, if it lies in the same allocation: a copy of a graph may not be launched when the memory
that it was captured with has been given back to the device (torch's ``empty_cache``), even if other memory lies there now. The lane
must be one that can be replayed.

The graphs of a lane never run at the same time, and share one pool for what they need in between. So nothing that a caller keeps
may lie there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

MOST_CALLS = 512
"""Different calls that a lane remembers; the one that was not used for the longest time is forgotten. Every layer of a model has
weights of its own: 80 layers with two products each are 320 calls, forward and back."""

_NEW = object()


class Replays:
    """The calls of one lane. ``recorder``: what captures; by default on the group's GPU."""

    def __init__(self, group: PeerGroup, lane: int, recorder: Recorder | None = None) -> None:
        self._group = group
        self._lane = group.lane(lane)
        self._graphs: OrderedDict[object, Any] = OrderedDict()  # None: seen once
        self._recorder = recorder or Recorder(group)
        self._pool: Any = None

    def run(
        self,
        key: object,
        addresses: Iterable[int],
        act: Callable[[], object],
        captured: Callable[[], object] | None = None,
    ) -> bool:
        """Replays a call, or captures it first, or does it, if it is the first of its kind. Whether it only had to be replayed.

        Args:
            key: what the graph knows.
            addresses: of the caller's memory that it knows, which is torch's.
            act: the call.
            captured: what is captured in its place, where that is something else.
        """
        graphs, lane, group = self._graphs, self._lane, self._group
        key = key, *map(group.memory.driver.identity_of, addresses)
        graph = graphs.pop(key, _NEW)
        if graph is _NEW:
            act()
            graphs[key] = None
            if len(graphs) > MOST_CALLS:
                graphs.popitem(last=False)
            return False
        graphs[key] = graph  # the last one now
        lane.check()
        was_ready = graph is not None
        try:
            if graph is None:
                graph = graphs[key] = self._capture(captured or act)
            lane.begin(group.current_stream())
            graph.replay()
        except BaseException as error:  # the other ranks do this call
            lane.cut_off(error)
            raise
        group.check_call(lane)
        return was_ready

    def forget(self) -> None:
        """Gives all graphs back, and their memory. Calls that come again are captured again."""
        self._graphs.clear()

    def _capture(self, act: Callable[[], object]) -> Any:
        # torch gives a pool up with the last graph that used it: it cannot be captured into again.
        if self._pool is None or all(graph is None for graph in self._graphs.values()):
            self._pool = self._recorder.new_pool()
        pool, self._pool = self._pool, None  # nor can one whose capture failed
        graph = self._recorder.capture(act, pool)
        self._pool = pool
        return graph


class Recorder:
    """Captures, one at a time, on one stream: torch keeps a workspace of cuBLAS for each stream that ever had a product."""

    def __init__(self, group: PeerGroup) -> None:
        self._cuda = torch_or_raise().cuda
        self._device = group.memory.driver.device
        self._stream: Any = self._cuda.Stream(self._device)

    def new_pool(self) -> Any:
        """Memory for graphs that never run at the same time."""
        return self._cuda.graph_pool_handle()

    def capture(self, work: Callable[[], object], pool: Any = None) -> Any:
        """A graph of what ``work`` enqueues on torch's current stream, which does not happen now. ``pool``: of memory that other
        graphs use too, none of which runs at the same time; None for a new one.
        """
        graph, pool = self._cuda.CUDAGraph(), self.new_pool() if pool is None else pool
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                with suppress(Exception):  # such as work that was not joined: it follows from the error
                    graph.capture_end()
                stop_recording(self._device, pool)
                raise
        return graph


def stop_recording(device: int, pool: Any) -> None:
    """What torch leaves out where the end of a capture fails.

    Its allocator would keep recording into the pool: it would free no memory any more, and end the process with an assertion at
    its exit. Its generator would draw no random numbers: in torch 2.11 it stays in the capture until another one has ended.
    """
    torch: Any = torch_or_raise()
    with suppress(Exception):  # torch has ended it, and its graph will give the pool back
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with suppress(Exception), torch.cuda.device(device):  # the device is in no state to capture anything
        counter, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            counter.zero_()  # torch warns of an empty graph
            graph.capture_end()
