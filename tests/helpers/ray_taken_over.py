"""What the Ray engine does with graphs that were built with Ray's own ``bind`` (`tests.helpers.ray_world`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import crossfade
from crossfade.errors import GraphError
from tests.helpers.ray_world import Worker, World, case, dies


@case
def what_cannot_be_taken_over_is_refused_with_the_reason(world: World) -> None:
    from ray.dag import InputNode

    first = world.rays(1)
    with InputNode() as inp:
        dags = {
            "async method": first.wait.bind(inp),
            "makes an actor": world.ray.remote(Worker).bind(1).add.bind(inp),
            "remote function": first.add.bind(world.ray.remote(_function).bind(inp)),
        }
    for reason, dag in dags.items():
        with pytest.raises(GraphError, match=rf"{reason}(.|\n)*hint: "):
            crossfade.compile(dag)


def _function(value: Any) -> Any:
    return value


@case
def rays_own_graphs_are_taken_over(world: World) -> None:
    from ray.dag import InputNode, MultiOutputNode

    ray = world.ray
    first, second = world.rays(1), world.rays(10, is_far=True)
    with InputNode() as inp:
        left, right = first.split.options(num_returns=2).bind(inp[0])
        dag = MultiOutputNode([second.both.bind(left, right=inp.y), second.add.bind(right), first.add.bind(inp[0])])
    graph = crossfade.compile(dag)
    assert ray.get(graph.execute(7, y=1)) == [8, 3, 8]
    assert ray.get(first.add.remote(1)) == 2  # ordinary calls go on
    graph.teardown()
    with InputNode() as inp:
        dag = second.add.bind(first.add.bind(inp))
    graph = crossfade.compile(dag, enable_asyncio=True)

    async def use() -> list[Any]:
        futures = [await graph.execute_async(number) for number in range(5)]
        return [await future for future in futures]

    assert asyncio.run(use()) == [11, 12, 13, 14, 15]
    graph.teardown()
    crossfade.shutdown()
    world.actors.clear()
    assert ray.get(second.add.remote(1)) == 11  # they are the user's, and live on
    with InputNode() as inp:
        graph = crossfade.compile(second.add.bind(inp))
    assert ray.get(graph.execute(1)) == 11
    assert ray.get(second.num_joined.remote()) == 1  # it has left what it was in before
    ray.kill(second)
    dies(lambda: ray.get(graph.execute(1)), "Worker0", within_s=5.0)
