"""Graphs compiled again, inside one another, from several threads and in an actor; ten thousand nodes, and a thousand actors."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api import session as sessions
from tests.helpers.counts import num
from tests.helpers.doers import Doer
from tests.helpers.graphs import kept_session, session_of
from tests.helpers.threads import together

NUM_THREADS = 8


class Worker(Doer):
    def add(self, a: int, b: int = 1) -> int:
        return a + b

    def fill(self, number: int) -> Any:
        return np.full(3000, number)

    def first(self, array: Any) -> int:
        return int(array[0])


class Driver:
    """An actor that has actors of its own."""

    def start(self) -> int:
        crossfade.init(ignore_reinit_error=True)
        self._worker = crossfade.remote(Worker).remote()
        self._graph = self._worker.add.bind(crossfade.InputNode()).compile()
        pid: int = self._worker.pid.remote().get()
        return pid

    def add_by_graph(self, number: int) -> int:
        value: int = self._graph.execute(number).get(timeout=30)
        return value

    def stop(self) -> bool:
        self._graph.teardown()
        crossfade.shutdown()
        return crossfade.is_initialized()


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[sessions.Session, tuple[Any, Any]]]:
    with kept_session() as session:
        with session_of(session):
            actor = crossfade.remote(Worker)
            both = actor.remote(), actor.remote()
        yield session, both


@pytest.fixture
def workers(kept: tuple[sessions.Session, tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Two actors, whose session is the program's."""
    session, both = kept
    with session_of(session):
        yield both


def test_the_same_nodes_with_different_options_at_once(workers: Any) -> None:
    first, second = workers
    dag = second.first.bind(first.fill.bind(crossfade.InputNode()))
    options: list[dict[str, Any]] = [
        {},
        {"max_inflight": 1},
        {"overlap": False},
        {"record": True},
        {"buffer_bytes": 100},
        {"debug": True},
    ]
    graphs = [dag.compile(**each) for each in options]
    refs = [[graph.execute(number) for graph in graphs] for number in range(1)]
    assert crossfade.get(refs) == [[0] * len(graphs)]
    for graph in graphs[::2]:
        graph.teardown()
    assert [graph.execute(7).get() for graph in graphs[1::2]] == [7, 7, 7]
    for graph in graphs:
        graph.teardown()


def test_graphs_that_share_nodes(workers: Any) -> None:
    first, second = workers
    with crossfade.InputNode() as inp:
        shared = first.add.bind(inp)
        left, right = second.add.bind(shared, 10), second.add.bind(shared, 20)
        whole = first.add.bind(left, right)
    with crossfade.MultiOutputNode([left, right, whole]).compile() as graph:
        assert crossfade.get(graph.execute(0)) == [11, 21, 32]
    with whole.compile() as graph, crossfade.MultiOutputNode([whole, shared]).compile() as other:
        assert graph.execute(1).get() == 34
        assert crossfade.get(other.execute(2)) == [36, 3]


def test_a_graph_inside_the_with_of_another(workers: Any) -> None:
    first, second = workers
    with crossfade.InputNode() as outer:
        one = first.add.bind(outer)
        other = second.add.bind(first.add.bind(crossfade.InputNode()))
        with one.compile() as graph:
            waiting = graph.execute(1)
            with other.compile() as nested:
                assert nested.execute(1).get() == 3
                assert graph.execute(2).get() == 3
            assert waiting.get() == 2


@pytest.mark.soak
def test_graphs_compiled_from_several_threads(workers: Any) -> None:
    """Each thread compiles, executes and tears down on shared actors."""
    first, second = workers

    def rounds(index: int) -> None:
        for turn in range(num(6, 50)):
            with second.first.bind(first.fill.bind(crossfade.InputNode())).compile(max_inflight=3) as graph:
                refs = [graph.execute(index * 1000 + turn + step) for step in range(3)]
                assert crossfade.get(refs, timeout=60) == [index * 1000 + turn + step for step in range(3)]

    together(rounds, range(NUM_THREADS))
    gc.collect()
    engine: Any = sessions.require().engine
    assert engine._plans == {}
    assert first.add.remote(1).get(timeout=30) == 2


def test_one_graph_executed_from_several_threads(workers: Any) -> None:
    first, second = workers
    with second.first.bind(first.fill.bind(crossfade.InputNode())).compile(max_inflight=NUM_THREADS) as graph:

        def executions(index: int) -> None:
            for turn in range(60):
                assert graph.execute(index * 1000 + turn).get(timeout=60) == index * 1000 + turn

        together(executions, range(NUM_THREADS))
        assert graph.statistics().num_finished == 60 * NUM_THREADS


def test_actors_started_and_called_from_several_threads(workers: Any) -> None:
    def use(index: int) -> int:
        actor = crossfade.remote(Worker).remote()
        value: int = actor.add.remote(index).get(timeout=60)
        crossfade.kill(actor)
        return value

    assert together(use, range(NUM_THREADS)) == list(range(1, NUM_THREADS + 1))


def test_teardown_while_another_thread_waits(workers: Any, pipe: Path) -> None:
    """It waits for the method that runs; whoever waits for its result gets it, and later calls say that the graph is gone."""
    first, _ = workers
    graph = first.read.bind(crossfade.InputNode()).compile()
    ref = graph.execute(str(pipe))
    got: list[Any] = []

    def wait() -> None:
        try:
            got.append(ref.get(timeout=60))
        except crossfade.SessionError as error:
            got.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    ending = threading.Thread(target=graph.teardown)
    ending.start()
    pipe.write_text("there")
    for thread in (*waiters, ending):
        thread.join(60)
        assert not thread.is_alive()
    assert len(got) == 3
    assert all(each == "there" or isinstance(each, crossfade.SessionError) for each in got)
    with pytest.raises(crossfade.SessionError, match="torn down"):
        graph.execute(str(pipe))


def test_several_threads_tear_one_graph_down(workers: Any) -> None:
    first, _ = workers
    for _ in range(5):
        graph = first.add.bind(crossfade.InputNode()).compile()
        ref = graph.execute(1)
        together(lambda _, graph=graph: graph.teardown(), range(NUM_THREADS))  # type: ignore[misc]
        with pytest.raises(crossfade.SessionError):
            ref.get()


def test_executions_race_a_teardown(workers: Any) -> None:
    first, second = workers
    for _ in range(5):
        graph = second.first.bind(first.fill.bind(crossfade.InputNode())).compile(max_inflight=4)

        def race(index: int, graph: Any = graph) -> None:
            if index == 0:
                graph.teardown()
                return
            try:
                while True:
                    assert graph.execute(index).get(timeout=60) == index
            except (crossfade.SessionError, crossfade.CapacityExceeded):
                return

        together(race, range(4))


def test_an_actor_may_be_a_driver_with_a_session_of_its_own() -> None:
    crossfade.init()
    try:
        driver = crossfade.remote(Driver).remote()
        pid = driver.start.remote().get(timeout=60)
        pidfd = os.pidfd_open(pid)
        with driver.add_by_graph.bind(crossfade.InputNode()).compile() as graph:
            assert [graph.execute(number).get(timeout=60) for number in range(3)] == [1, 2, 3]
        assert driver.stop.remote().get(timeout=60) is False
        driver.start.remote().get(timeout=60)
    finally:
        crossfade.shutdown()
    os.close(pidfd)


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_actors_of_an_actor_end_with_it(is_killed: bool) -> None:
    import select

    crossfade.init()
    try:
        driver = crossfade.remote(Driver).remote()
        pidfd = os.pidfd_open(driver.start.remote().get(timeout=60))
        if is_killed:
            crossfade.kill(driver)
    finally:
        crossfade.shutdown()
    assert select.select([pidfd], [], [], 10)[0] == [pidfd]
    os.close(pidfd)


class Nested:
    """Compiles a graph inside a method, on the actors of the session that it finds."""

    def __init__(self) -> None:
        self._graph: Any = None

    def work(self, number: int) -> int:
        if self._graph is None:
            self._graph = crossfade.remote(Worker).remote().add.bind(crossfade.InputNode()).compile()
        value: int = self._graph.execute(number).get()
        return value


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_a_graph_compiled_and_executed_inside_a_method(engine: str) -> None:
    crossfade.init(engine=engine)
    try:
        nested = crossfade.remote(Nested).remote()
        with nested.work.bind(crossfade.InputNode()).compile() as graph:
            assert [graph.execute(number).get(timeout=60) for number in range(3)] == [1, 2, 3]
    finally:
        crossfade.shutdown()


SMALL, LARGE = 1_000, 10_000


class Counter:
    def add(self, *values: int) -> int:
        return 1 + max(values)

    def same(self, value: bytes) -> bytes:
        return value


@contextmanager
def actors_of(engine: str, num_actors: int) -> Iterator[list[Any]]:
    """The actors of a session of its own."""
    crossfade.init(engine=engine)
    try:
        actor = crossfade.remote(Counter)
        yield [actor.remote() for _ in range(num_actors)]
    finally:
        crossfade.shutdown()


def _chain(actors: list[Any], num_nodes: int, transport: str = "auto") -> Any:
    value: Any = crossfade.InputNode()
    for index in range(num_nodes):
        value = actors[index % len(actors)].add.bind(value).with_tensor_transport(transport)
    return value


def _layers(actors: list[Any], num_nodes: int) -> Any:
    values: list[Any] = [crossfade.InputNode()] * 4
    for index in range(0, num_nodes, 4):
        values = [
            actors[(index + place) % len(actors)].add.bind(values[place], values[(place + 1) % 4]) for place in range(4)
        ]
    return crossfade.MultiOutputNode(values)


def _fan(actors: list[Any], num_nodes: int) -> Any:
    whole = crossfade.InputNode()
    return actors[0].add.bind(*(actors[index % len(actors)].add.bind(whole) for index in range(num_nodes - 1)))


def _gloo_chain(actors: list[Any], num_nodes: int) -> Any:
    return _chain(actors, num_nodes, "gloo")


SHAPES: dict[str, tuple[Callable[[list[Any], int], Any], Callable[[int], Any]]] = {
    "chain": (_chain, lambda num_nodes: num_nodes),
    "layers": (_layers, lambda num_nodes: [num_nodes // 4] * 4),
    "fan": (_fan, lambda num_nodes: 2),
    "gloo chain": (_gloo_chain, lambda num_nodes: num_nodes),
}


def check_all(output: Any, expected: Any) -> float:
    """Everything that can be done with a graph; the driver's time for it."""
    start_s = time.process_time()
    with output.compile() as graph:
        assert crossfade.get(graph.execute(0), timeout=100) == expected
        assert crossfade.parse_plan(str(graph.plan)) == graph.plan
        assert graph.predicted_timeline().makespan_us > 0
        assert graph.statistics().num_finished == 1
    return time.process_time() - start_s


@pytest.mark.parametrize(
    ("engine", "num_actors", "shape", "num_nodes"),
    [
        *(("inline", 1, shape, SMALL) for shape in SHAPES if shape != "fan"),
        ("inline", 1, "fan", LARGE),
        *(("inline", 1_000, shape, SMALL) for shape in SHAPES),
        ("local", 8, "layers", SMALL),
    ],
)
def test_many_nodes_and_actors(engine: str, num_actors: int, shape: str, num_nodes: int) -> None:
    make, expected = SHAPES[shape]
    with actors_of(engine, num_actors) as actors:
        check_all(make(actors, num_nodes), expected(num_nodes))


def test_a_chain_of_two_thousand_edges_with_ten_slots_each() -> None:
    """A process may have 65,530 mappings, and each slot takes one in its writer and in its reader."""
    with actors_of("local", 2) as actors:
        value: Any = crossfade.InputNode()
        for index in range(2_000):
            value = actors[index % 2].same.bind(value)
        with value.compile(max_inflight=10) as graph:
            for number in range(12):
                assert graph.execute(bytes([number]) * 3000).get(timeout=60) == bytes([number]) * 3000
