"""A cluster of two or three nodes of this machine, which count as hosts, and the cases that run on it, as functions of it."""

from __future__ import annotations

import gc
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.channels.wire import Wire
from crossfade.engines.actor import _joined
from crossfade.errors import ActorDiedError

CASES: dict[str, Callable[[Any], None]] = {}
LONG: list[str] = []


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


def long(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """A case that takes seconds."""
    LONG.append(function.__name__)
    return case(function)


class Worker:
    """An actor's class, for both engines' decorators."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.kept: list[Any] = []

    def add(self, value: Any) -> Any:
        return value + self.offset

    def both(self, left: Any, right: Any = 0) -> Any:
        return left + right

    def split(self, value: Any) -> tuple[Any, Any]:
        return value, -value

    def same(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def sum_of_kept(self, _: Any) -> float:
        return float(sum(np.sum(each) for each in self.kept))

    def fail(self, value: Any) -> Any:
        if value == 3:
            raise ValueError("three")
        return value

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def pid(self) -> int:
        return os.getpid()

    def break_wires(self, value: Any) -> Any:
        """The connections of this process with other hosts end, and no process does."""
        for each in gc.get_objects():
            if isinstance(each, Wire) and each._stream is not None:
                each._stream.end()
        return value

    def num_joined(self) -> int:
        return len(_joined)

    async def wait(self, value: Any) -> Any:
        return value


class World:
    """The cluster. ``near`` and ``far`` place an actor on the driver's node, or on the other one, and ``third`` on one that is made
    for the first of them. A node claims to have two GPUs, or where ``has_gpus`` has one of this machine's.
    """

    def __init__(self, *, has_gpus: bool = False) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        self._has_gpus = has_gpus
        self.nodes: list[Any] = []
        self.cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **self._resources(0)})
        self._third: Any = None
        self.actors: dict[tuple[str, int], Any] = {}
        self.add_node()
        ray.init(address=self.cluster.address, logging_level="ERROR", log_to_driver=False)
        self.own = ray.get_runtime_context().get_node_id()

    def add_node(self) -> None:
        self.nodes.append(self.cluster.add_node(**self._resources(len(self.nodes) + 1)))

    def _resources(self, node: int) -> dict[str, Any]:
        if self._has_gpus:
            return {"num_cpus": 4, "num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": str(node)}}
        return {"num_cpus": 4, "num_gpus": 2}

    def at(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)

    def make(self, cls: Any, *args: Any, is_far: bool, **options: Any) -> Any:
        """An actor of this class."""
        node = self.nodes[0].node_id if is_far else self.own
        return crossfade.remote(cls).options(scheduling_strategy=self.at(node), **options).remote(*args)

    def _new(self, node: str, offset: int, **options: Any) -> Any:
        return crossfade.remote(Worker).options(scheduling_strategy=self.at(node), **options).remote(offset)

    def _known(self, node: str, offset: int) -> Any:
        """To start a worker takes seconds: cases share those that they leave as they were."""
        if (node, offset) not in self.actors:
            self.actors[node, offset] = self._new(node, offset)
        return self.actors[node, offset]

    def near(self, offset: int = 0) -> Any:
        return self._known(self.own, offset)

    def far(self, offset: int = 0) -> Any:
        return self._known(self.nodes[0].node_id, offset)

    def third(self, offset: int = 0) -> Any:
        if self._third is None:
            self._third = self.cluster.add_node(**self._resources(len(self.nodes) + 1))
        return self._known(self._third.node_id, offset)

    def remove_third(self) -> None:
        self.cluster.remove_node(self._third, allow_graceful=False)
        self._third = None

    def near_victim(self, **options: Any) -> Any:
        return self._new(self.own, 1, **options)

    def far_victim(self, which: int = 0, **options: Any) -> Any:
        return self._new(self.nodes[which].node_id, 1, **options)

    def rays(self, offset: int = 0, *, is_far: bool = False, **options: Any) -> Any:
        node = self.nodes[0].node_id if is_far else self.own
        return self.ray.remote(Worker).options(scheduling_strategy=self.at(node), **options).remote(offset)


def dies(call: Callable[[], Any], *words: str, within_s: float) -> None:
    """A call raises that an actor has died, naming it and its node."""
    start = time.monotonic()
    with pytest.raises(ActorDiedError) as caught:
        _repeat(call, within_s + 5)
    for word in words:
        assert word in str(caught.value)
    assert time.monotonic() - start < within_s


def run(graph: Any, value: Any = 1) -> Any:
    """What one execution gives."""
    return crossfade.get(graph.execute(value))


def _repeat(call: Callable[[], Any], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        call()


def await_ends(pids: Sequence[int], within_s: float) -> None:
    """Waits until these processes have ended."""
    deadline = time.monotonic() + within_s
    for pid in pids:
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            ended, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(pidfd)
            assert ended, f"process {pid} is still there after {within_s} s"
