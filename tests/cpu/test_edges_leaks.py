"""Executions, and graphs that come and go, leave nothing behind. The long counts are in tests/soak."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api import session as sessions
from tests.helpers.counts import num
from tests.helpers.footprint import Footprint, footprint, growth

KIB = 1024
HAS_TORCH = find_spec("torch") is not None


class Worker:
    """Passes values on, and fails now and then."""

    def __init__(self) -> None:
        self._num_calls = 0

    def pid(self) -> int:
        return os.getpid()

    def same(self, value: Any) -> Any:
        return value

    @crossfade.method(num_returns=2)
    def twice(self, value: Any) -> Any:
        return value, value

    def second(self, value: Any, *, other: Any) -> Any:
        return other

    def fail_sometimes(self, value: Any) -> Any:
        self._num_calls += 1
        if self._num_calls % 50 == 0:
            raise ValueError(self._num_calls)
        return value

    def stop_collecting(self) -> None:
        gc.disable()

    def go_on_collecting(self) -> None:
        gc.enable()

    def collect(self) -> dict[str, int]:
        """Collects garbage, and says how much the actor's own books hold."""
        gc.collect()
        (server,) = (each for each in gc.get_objects() if type(each).__qualname__ == "Actor")
        names = ("_parts", "_running", "_bells", "_pidfds")
        return {name: len(getattr(server, name)) for name in names} | {"handlers": len(server._doorbell._handlers)}


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Any, Any]]:
    crossfade.init()
    actor = crossfade.remote(Worker)
    yield actor.remote(), actor.remote()
    crossfade.shutdown()


def _output(workers: tuple[Any, Any], transport: str = "auto") -> Any:
    first, second = workers
    with crossfade.InputNode() as inp:
        one, other = first.twice.bind(inp)
        swapped = second.second.bind(one.with_tensor_transport(transport), other=other)
        return crossfade.MultiOutputNode([swapped, second.fail_sometimes.bind(one)])


def _values() -> list[Any]:
    values: list[Any] = [1, "x", None, {"a": [1.5]}, b"y" * 5000, *(np.zeros(size) for size in (10, 1000, 10_000))]
    if HAS_TORCH:
        import torch

        values += [torch.zeros(size) for size in (10, 1000, 10_000)]
    return values


def _execute(graph: Any, value: Any) -> None:
    for ref in graph.execute(value):
        try:
            ref.get(timeout=60)
        except ValueError:
            continue


class Census:
    def __init__(self, workers: tuple[Any, Any]) -> None:
        self._workers = workers
        self._pids = [os.getpid(), *(worker.pid.remote().get() for worker in workers)]

    def take(self) -> list[Footprint]:
        """After a collection of garbage everywhere."""
        self.books()
        return [footprint(pid) for pid in self._pids]

    def books(self) -> list[dict[str, int]]:
        """How much is in the driver's and the actors' books."""
        gc.collect()
        session: Any = sessions.require()
        engine = session.engine
        mine = {
            "graphs": len(session.graphs),
            "plans": len(engine._plans),
            "handlers": len(engine.doorbell._handlers),
            "awaited": sum(len(each.awaited) + len(each.replies) for each in engine.processes.living.values()),
            "known": sum(len(each.known) for each in engine.processes.living.values()),
        }
        return [mine, *(worker.collect.remote().get() for worker in self._workers)]


@pytest.mark.soak
def test_executions_leave_nothing(workers: Any) -> None:
    """After the first executions nothing grows: 3,000 of them, or a million."""
    values = _values()
    census = Census(workers)
    with _output(workers).compile() as graph:
        for number in range(10_000):
            _execute(graph, values[number % len(values)])
        before, books = census.take(), census.books()
        for number in range(num(3_000, 990_000)):
            _execute(graph, values[number % len(values)])
            if number % 100 == 0:
                workers[0].same.remote(values[number % len(values)]).get(timeout=60)
        after = census.take()
        assert census.books() == books
    check_growth(before, after, slack_kib=2048)


def check_cycles(workers: tuple[Any, Any], num_first: int, num_more: int, transport: str, slack_kib: int) -> None:
    """After the first graphs nothing grows with more."""
    census = Census(workers)
    value = np.zeros(3000)

    def cycle() -> None:
        with _output(workers, transport).compile() as graph:
            for _ in range(3):
                _execute(graph, value)

    for _ in range(num_first):
        cycle()
    before, books = census.take(), census.books()
    for _ in range(num_more):
        cycle()
    after = census.take()
    assert census.books() == books
    check_growth(before, after, slack_kib)


def check_growth(before: list[Footprint], after: list[Footprint], slack_kib: int) -> None:
    """The allocator's own books may grow by ``slack_kib``; everything that is counted may not grow."""
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        grown = growth(old, new)
        print(
            f"process {index}: {new.private_bytes / KIB / KIB:.1f} MB; grown since the first: {grown}"
        )  # for `pytest -rP`
        few = {name for name, size in grown.items() if name == "private_bytes" and size <= slack_kib * KIB}
        assert set(grown) <= few, f"process {index} has grown: {grown}"


@pytest.mark.soak
def test_graphs_through_shared_memory_leave_nothing(workers: Any) -> None:
    check_cycles(workers, num(10, 20), num(30, 1_000), "auto", slack_kib=num(512, 1024))


@pytest.mark.soak
def test_graphs_through_gloo_leave_nothing(workers: Any) -> None:
    """Fewer, since each opens a TCP connection between every two parties."""
    pytest.importorskip("torch")
    check_cycles(workers, num(3, 20), num(5, 200), "gloo", slack_kib=num(2048, 4096))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_torn_graph_holds_no_memory_though_nobody_collects_garbage(workers: Any, transport: str) -> None:
    """Idle actors never collect: what they let go of has to die by itself. Nor does a torn graph that is kept hold it."""
    if transport == "gloo":
        pytest.importorskip("torch")
    first, second = workers
    pids = [os.getpid(), *(worker.pid.remote().get() for worker in workers)]
    value = np.zeros(500_000)
    graphs: list[Any] = []
    sizes: list[list[int]] = []
    gc.collect()
    gc.disable()
    try:
        for worker in workers:
            worker.stop_collecting.remote().get()
        for _ in range(6):
            middle = first.same.bind(crossfade.InputNode()).with_tensor_transport(transport)
            with second.same.bind(middle).compile() as graph:
                assert graph.execute(value).get(timeout=60).size == value.size
            graphs.append(graph)
            sizes.append([footprint(pid).shared_bytes for pid in pids])
    finally:
        gc.enable()
        for worker in workers:
            worker.go_on_collecting.remote().get()
    assert np.all(np.array(sizes[-1]) - np.array(sizes[1]) < value.nbytes)


@pytest.mark.timeout(60)
def test_slots_hold_no_descriptor(workers: Any) -> None:
    first, second = workers
    pids = [os.getpid(), *(worker.pid.remote().get() for worker in workers)]
    with second.same.bind(first.same.bind(crossfade.InputNode())).compile(max_inflight=20) as graph:
        assert graph.execute(1).get() == 1
        before = [footprint(pid) for pid in pids]
        kept = [graph.execute(np.zeros(1000)).get() for _ in range(60)]
        after = [footprint(pid) for pid in pids]
    assert [each.num_descriptors for each in after] == [each.num_descriptors for each in before]
    assert sum(each.num_ring_mappings for each in after) > sum(each.num_ring_mappings for each in before)
    assert len(kept) == 60


def _address(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_receive_buffers_are_used_again_once_their_value_has_died() -> None:
    pytest.importorskip("torch")
    from crossfade.channels.receive_buffers import ReceiveBuffers

    buffers = ReceiveBuffers()
    buffers.num_slots = 2
    size = 40_000_000
    first = buffers.take(size)
    view = first[100:200]
    address = _address(first)
    del first
    second = buffers.take(size)
    assert _address(second) != address  # a view of the first is alive
    del view
    third = buffers.take(size - 1_000_000)
    assert _address(third) == address
    assert third.nbytes == size - 1_000_000
    del second, third
    assert len(buffers._free) == 2
    small = buffers.take(17 << 20)  # neither fits, since half of it would be wasted
    assert len(buffers._free) == 1
    del small
    assert not buffers._lent
    assert buffers.take(0).nbytes == 0


@pytest.mark.parametrize("kind", ["array", "read-only array", "view of an array", "tensor", "part of a tensor"])
def test_no_receive_buffer_is_used_again_under_a_value(kind: str) -> None:
    """numpy shortens chains of views: it must not shorten away the object whose death is waited for."""
    pytest.importorskip("torch")
    from crossfade.channels.receive_buffers import ReceiveBuffers

    buffers = ReceiveBuffers()
    buffers.num_slots = 4
    value = _value_on(buffers.take(20_000_000), kind)
    assert len(buffers._lent) == 1
    assert buffers._free == []
    del value
    assert len(buffers._free) == 1


def _value_on(memory: memoryview, kind: str) -> Any:
    import torch

    array: Any = np.ndarray((8, 8), np.uint8, memory[64:].toreadonly() if kind == "read-only array" else memory[64:])
    tensor: Any = torch.frombuffer(memory[64:128], dtype=torch.float32)
    return {"view of an array": array[2:4, ::2].T, "tensor": tensor, "part of a tensor": tensor.view(4, 4)[1]}.get(
        kind, array
    )
