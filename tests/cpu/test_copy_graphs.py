"""Compiled graphs over copy and staged channels, between processes; where there is no GPU, CPU tensors stand for device ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers.copy_graphs import Worker, chain, expected, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("torn_down")


class Failing(Worker):
    def pack_lock_if_odd(self, size: int) -> Any:
        return [torch.arange(size), threading.Lock() if size % 2 else None]

    def length(self, value: Any) -> int:
        return len(value)


Remote = crossfade.remote(Failing)


@pytest.fixture(scope="module")
def actors(session: None) -> list[Any]:
    return [Remote.remote() for _ in range(3)]


@pytest.fixture(params=["copy", "staged"])
def transport(request: Any) -> str:
    return str(request.param)


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"overlap": True}, {"buffer_bytes": 100_000}], ids=str)
def test_tensors_of_changing_lengths(actors: list[Any], options: dict[str, Any], transport: str) -> None:
    graph = chain(actors, transport, **options)
    sizes = [0, 1, 10, 1000, 5, 100_000, 100_000, 7]
    for size in sizes:
        assert run(graph, size) == expected(size)
    num_ahead = min(len(sizes), graph.plan.max_inflight)
    refs = [graph.execute(size) for size in sizes[:num_ahead]]
    assert [crossfade.get(ref, timeout=30) for ref in refs] == [expected(size) for size in sizes[:num_ahead]]
    assert {spec.transport for spec in graph.plan.channels if spec.id in ("n0", "n1")} == {transport}
    graph.teardown()


def test_a_tensor_that_is_longer_than_what_is_set_aside_for_its_way(actors: list[Any], transport: str) -> None:
    graph = chain(actors, transport)
    refs = [graph.execute(size) for size in (5_000_000, 3, 4_000_000)]
    assert [crossfade.get(ref, timeout=60) for ref in refs] == [expected(size) for size in (5_000_000, 3, 4_000_000)]


def test_values_that_hold_tensors_among_other_things(actors: list[Any], transport: str) -> None:
    first, second, _ = actors
    graph = second.describe.bind(first.pack.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
    for size in (1, 3, 0):
        assert graph.execute(size).get(timeout=30) == ("x" * size, list(range(size)), True, None)


def test_a_value_that_cannot_be_pickled_costs_one_execution_and_says_where(actors: list[Any], transport: str) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        graph = second.length.bind(first.pack_lock_if_odd.bind(given).with_tensor_transport(transport)).compile()
    for size in range(4):
        ref = graph.execute(size)
        if size % 2:
            with pytest.raises(
                TypeError, match=r"pickling what it returned(.|\n)*cannot pickle(.|\n)*hint: locks, open"
            ):
                ref.get(timeout=30)
        else:
            assert ref.get(timeout=30) == 2


def test_a_method_that_raises_before_it_sends_costs_one_execution(actors: list[Any], transport: str) -> None:
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.fail_if_odd.bind(given).with_tensor_transport(transport)
        graph = third.total.bind(second.double.bind(made).with_tensor_transport(transport)).compile()
    for size in range(10):
        ref = graph.execute(size)
        if size % 2:
            with pytest.raises(KeyError):
                ref.get(timeout=30)
        else:
            assert ref.get(timeout=30) == size * (size - 1)


def test_kept_tensors_stay_whole_also_after_teardown_and_their_memory_comes_back(
    actors: list[Any], transport: str
) -> None:
    first, second, _ = actors
    for _ in range(3):
        graph = second.keep.bind(first.make.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
        for size in (10, 20, 3000, 4, 3000):
            assert graph.execute(size).get(timeout=30)
        graph.teardown()
    crossfade.get(second.drop.remote())
    graph = chain(actors, transport)
    assert run(graph, 5) == expected(5)
    graph.teardown()


def test_two_graphs_on_the_same_actors(actors: list[Any], transport: str) -> None:
    one, other = chain(actors, transport), chain(actors[::-1], transport)
    refs = [(size, one.execute(size), other.execute(size + 1)) for size in range(0, 3000, 500)]
    for size, mine, theirs in refs:
        assert crossfade.get(mine, timeout=30) == expected(size)
        assert crossfade.get(theirs, timeout=30) == expected(size + 1)
    one.teardown()
    assert run(other, 4) == expected(4)


def test_a_reader_asks_for_memory_while_its_program_stands_elsewhere(actors: list[Any], transport: str) -> None:
    """The second actor waits for the third, which waits for the first, whose longer value needs new slots on the second."""
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        other = first.make.bind(given)
        late = third.double.bind(other).with_tensor_transport(transport)
        graph = second.total.bind(late, made).compile(overlap=True)
    for size in (1, 10, 100, 1000, 10_000, 100_000):
        assert graph.execute(size).get(timeout=30) == 3 * (size * (size - 1) // 2)
