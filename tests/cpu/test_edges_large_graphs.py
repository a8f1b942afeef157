"""Ten thousand nodes, and a thousand actors. Both at once, and that the time grows as their number does, are for tests/soak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import crossfade

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
