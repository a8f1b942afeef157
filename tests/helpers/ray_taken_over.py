"""What the Ray engine does with graphs that were built with Ray's own ``bind`` (`tests.helpers.ray_world`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import crossfade
from crossfade.errors import GraphError
from tests.helpers.ray_world import Worker, World, case, dies, long


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
    with pytest.raises(TypeError, match=r"hint: ray\.get\(\.\.\.\) takes it"):
        crossfade.get(graph.execute(7, y=1))
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


@case
def an_actor_that_was_killed_before_the_first_execution_is_dead_for_it(world: World) -> None:
    _kill_one_after_another(world, 4)


@long
def twenty_actors_that_were_killed_before_the_first_execution(world: World) -> None:
    for _ in range(5):
        _kill_one_after_another(world, 5)


def _kill_one_after_another(world: World, number: int) -> None:
    """As the quick start of Compiled Graph ends: one of the actors is killed as soon as the graph is compiled, the very next
    execution tells, the others live, and a graph of them is compiled.
    """
    from ray.dag import InputNode, MultiOutputNode

    ray = world.ray
    actors = [world.rays(k, is_far=k % 2 == 1) for k in range(number)]
    while len(actors) > 1:
        with InputNode() as inp:
            dag = MultiOutputNode([actor.add.bind(inp) for actor in actors])
        compiled = crossfade.compile(dag)
        ray.kill(actors[0])
        references = compiled.execute(1)
        how = r"by what Ray says: .*ray\.kill|its process.* has ended"  # it may end before Ray is asked
        with pytest.raises(ray.exceptions.ActorDiedError, match=rf"actor Worker\d+ is dead: on .*({how})") as caught:
            ray.get(references)
        engine: Any = compiled._session.engine
        assert engine._launched[caught.value.actor].handle == actors[0]
        living = []
        for actor in actors:
            try:
                ray.get(actor.add.remote(1))
            except ray.exceptions.RayActorError:
                continue
            living.append(actor)
        assert living == actors[1:]
        actors = living
    with InputNode() as inp:
        compiled = crossfade.compile(actors[0].add.bind(inp))
    assert ray.get(compiled.execute(1)) == number
