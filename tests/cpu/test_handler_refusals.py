"""A signal's handler that uses a graph in the middle of that graph's own call is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import crossfade
from tests.helpers.builds import interpreted_only
from tests.helpers.handlers import handler_once, pairs, sleeps, slow_graph, with_a_handler

pytestmark = pytest.mark.timeout(60)


async def execute_async(graph: crossfade.CompiledGraph) -> object:
    return await (await graph.execute_async(2, 2))


async def awaited(ref: crossfade.Ref) -> object:
    return await ref


USES: dict[str, Callable[[Any, Any], object]] = {
    "execute": lambda graph, ref: graph.execute(2, 2),
    "execute_async": lambda graph, ref: asyncio.run(execute_async(graph)),
    "get": lambda graph, ref: ref.get(timeout=20),
    "get of a list": lambda graph, ref: crossfade.get([ref], timeout=20),
    "await": lambda graph, ref: asyncio.run(awaited(ref)),
    "wait": lambda graph, ref: crossfade.wait([ref], timeout=20),
    "teardown": lambda graph, ref: graph.teardown(),
}
"""What a handler may not do with a graph, and a result of it, in the middle of a call of that graph."""


def refusal_of(use: str, graph: crossfade.CompiledGraph, ref: Any) -> BaseException:
    with pytest.raises(crossfade.SessionError, match="in the middle of its own call") as caught:
        USES[use](graph, ref)
    assert "set a flag" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_handler_that_uses_the_graph_in_the_middle_of_its_execute_is_refused(
    engine: str, index: int, use: str
) -> None:
    graph, refused = pairs(), list[object]()
    first = graph.execute(1, 1)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._writes[index] = with_a_handler(driver._writes[index], lambda: refused.append(refusal_of(use, graph, first)))
    assert graph.execute(2, 2).get() == (2, 2)
    assert len(refused) == 1
    assert first.get() == (1, 1)
    assert graph.execute(3, 3).get() == (3, 3)
    graph.teardown()


@pytest.mark.parametrize("use", USES)
def test_a_handler_that_uses_the_graph_in_the_middle_of_a_get_is_refused_and_swaps_no_results(
    engine: str, use: str
) -> None:
    graph, refused = pairs(), list[object]()
    first, second = graph.execute(1, 1), graph.execute(2, 2)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._reads[0] = with_a_handler(driver._reads[0], lambda: refused.append(refusal_of(use, graph, second)))
    assert (first.get(timeout=20), second.get(timeout=20)) == ((1, 1), (2, 2))
    assert len(refused) == 1
    graph.teardown()


@interpreted_only("it replaces a method of a compiled class")
@pytest.mark.parametrize("use", USES)
def test_a_handler_that_uses_the_graph_in_the_middle_of_its_teardown_is_refused(engine: str, use: str) -> None:
    graph, refused = pairs(), list[object]()
    first = graph.execute(1, 1)
    opened: Any = graph._executions.opened
    opened.close = with_a_handler(opened.close, lambda: refused.append(refusal_of(use, graph, first)))
    graph.teardown()
    assert len(refused) == 1
    with pytest.raises(crossfade.SessionError, match="torn down"):
        first.get()


@pytest.mark.parametrize("use", ["get", "teardown"])
def test_a_handler_that_uses_the_graph_while_the_program_waits_for_its_result_is_refused(local: None, use: str) -> None:
    graph, refused = slow_graph(), list[object]()
    ref, later = graph.execute(0.4), graph.execute(0.01)
    with handler_once(lambda: refused.append(refusal_of(use, graph, later)), sleeps()):
        assert ref.get(timeout=30) == 0.4
    assert len(refused) == 1
    assert later.get(timeout=20) == 0.01
    graph.teardown()


def test_what_a_handler_does_not_catch_of_a_refusal_ends_the_graph(engine: str) -> None:
    graph = pairs()
    first, second = graph.execute(1, 1), graph.execute(2, 2)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._reads[0] = with_a_handler(driver._reads[0], lambda: second.get(timeout=20))
    with pytest.raises(crossfade.SessionError, match="in the middle of its own call"):
        first.get(timeout=20)
    with pytest.raises(crossfade.SessionError, match="interrupted in the middle"):
        second.get(timeout=20)
    graph.teardown()
