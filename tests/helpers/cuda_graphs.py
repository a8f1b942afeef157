"""torch's CUDA graphs, played on a CPU: what is enqueued in a capture waits for a replay. Pools of memory die as torch's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

Pool = int


class Machine:
    """A device whose streams run at once, but for what is captured."""

    def __init__(self) -> None:
        self.num_replays = self.num_streams = 0
        self.log: list[str] = []  # what is done, in order
        self.pools: list[Pool] = []  # of each capture that was begun
        self.is_unjoined = False  # the end of a capture fails, as where work was left on another stream
        self._recorded: list[Callable[[], object]] | None = None
        self._uses: dict[Pool, int] = {}
        self._recording: set[Pool] = set()
        self._num_pools = 0

    @property
    def num_captures(self) -> int:
        """Graphs that were begun."""
        return len(self.pools)

    @property
    def is_capturing(self) -> bool:
        return self._recorded is not None

    def do(self, work: Callable[[], object]) -> None:
        if self._recorded is None:
            work()
        else:
            self._recorded.append(work)

    def new_pool(self) -> Pool:
        self._num_pools += 1
        return self._num_pools

    def begin(self, pool: Pool) -> None:
        """A capture into a pool: a new one, or one that a graph uses."""
        assert self._recorded is None, "one capture at a time"
        assert pool not in self._recording, "already recording to this pool"
        assert self._uses.get(pool, 1) > 0, "no graph uses this pool any more"
        self._uses[pool] = self._uses.get(pool, 0) + 1
        self._recording.add(pool)
        self._recorded = []
        self.pools.append(pool)

    def end(self, pool: Pool) -> list[Callable[[], object]]:
        """What was captured."""
        recorded, self._recorded = self._recorded, None
        assert recorded is not None
        if self.is_unjoined:
            raise RuntimeError("unjoined work")
        self._recording.discard(pool)
        return recorded

    def stop_recording(self, device: Any, pool: Pool) -> None:
        if pool not in self._recording:
            raise RuntimeError("not currently recording to this pool")
        self._recording.discard(pool)

    def release(self, device: Any, pool: Pool) -> None:
        """What a graph does at its end, if its capture has ended; else it does not."""
        self._uses[pool] -= 1
        assert self._uses[pool] >= 0, "given back twice"

    @property
    def is_recording(self) -> bool:
        """Whether torch's allocator takes memory for a capture."""
        return bool(self._recording)

    def graph(self) -> Graph:
        return Graph(self)

    def stream(self, device: Any) -> Stream:
        self.num_streams += 1
        return Stream(self)


class Graph:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._pool: Pool | None = None
        self._work: list[Callable[[], object]] = []
        self._has_ended = False

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local", "other threads go on meanwhile"
        pool = self._machine.new_pool() if pool is None else pool
        self._machine.begin(pool)
        self._pool = pool

    def capture_end(self) -> None:
        assert self._pool is not None
        self._work = self._machine.end(self._pool)
        self._has_ended = True

    def replay(self) -> None:
        self._machine.num_replays += 1
        self._machine.log.append("replay")
        for work in self._work:
            work()

    def __del__(self) -> None:
        if self._pool is not None and self._has_ended:
            self._machine.release(None, self._pool)


class Stream:
    def __init__(self, machine: Machine) -> None:
        self._log = machine.log

    def wait_stream(self, stream: Any) -> None:
        self._log.append("wait for a stream")


class Event:
    """Time stands still but for 8 us between a call's beginning and its end."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 0.008


@contextmanager
def _entered(stream: Any) -> Iterator[None]:
    yield


def play(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine in the place of torch's CUDA."""
    machine = Machine()
    fakes: dict[str, Any] = {
        "CUDAGraph": machine.graph,
        "Stream": machine.stream,
        "Event": Event,
        "stream": _entered,
        "current_stream": lambda device=None: Stream(machine),
        "graph_pool_handle": machine.new_pool,
        "synchronize": lambda device=None: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", machine.stop_recording)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", machine.release)
    return machine
