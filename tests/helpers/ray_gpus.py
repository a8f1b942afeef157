"""Actors with GPUs on the Ray engine (`tests.helpers.ray_world`): without GPUs, CPU tensors stand for theirs and gloo for NCCL."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import crossfade
from tests.helpers.copy_graphs import NcclWorker
from tests.helpers.ray_world import World, case, dies, run


class Worker(NcclWorker):
    def gpus(self) -> tuple[list[str], str | None]:
        import ray

        return [str(each) for each in ray.get_gpu_ids()], os.environ.get("CUDA_VISIBLE_DEVICES")


@case
def gpus_that_ray_gives_actors_are_those_of_the_plan(world: World) -> None:
    """Every process sees all GPUs of its host, as with the local engine."""
    cls = crossfade.remote(num_gpus=1)(Worker)
    here = [cls.options(scheduling_strategy=world.at(world.own)).remote() for _ in range(2)]
    there = world.make(Worker, is_far=True, num_gpus=0.5)
    with crossfade.InputNode() as inp:
        graph = crossfade.MultiOutputNode([actor.make.bind(inp) for actor in (*here, there)]).compile()
    for actor in (*here, there):
        (gpu,), mask = crossfade.get(actor.gpus.remote())
        assert graph.plan.devices[actor._info.id] == (int(gpu),)
        assert not mask
    assert sorted(graph.plan.devices[actor._info.id] for actor in here) == [(0,), (1,)]
    assert [got.tolist() for got in crossfade.get(graph.execute(3))] == [[0, 1, 2]] * 3
    graph.teardown()
    for actor in (*here, there):
        crossfade.kill(actor)


@case
def tensors_of_gpus_go_between_hosts_by_nccl(world: World) -> None:
    """Of changing lengths, ahead of each other, to readers of both hosts; the driver gets what is left."""
    first = world.make(Worker, is_far=False, num_gpus=1)
    others = [world.make(Worker, is_far=is_far, num_gpus=0.5) for is_far in (True, True, False)]
    with crossfade.InputNode() as inp:
        made = first.make.bind(inp)
        made.with_tensor_transport(crossfade.Transport.NCCL)
        doubled = others[0].double.bind(made)  # 'auto', back to the first host
        outputs = [first.total.bind(doubled), *(other.total.bind(made) for other in others)]
        dag = crossfade.MultiOutputNode(outputs)
    for options in ({}, {"max_inflight": 1}, {"overlap": True}):
        with dag.compile(**options) as graph:
            transports = {channel.id: str(channel.transport) for channel in graph.plan.channels}
            assert sorted(kind for name, kind in transports.items() if name[0] == "n")[:3] == ["nccl"] * 3
            assert crossfade.parse_plan(str(graph.plan)) == graph.plan
            pending: list[tuple[int, Any]] = []
            for size in (0, 1, 10, 1000, 5, 100_000, 100_000, 7):
                if len(pending) == graph.plan.max_inflight:
                    _check(*pending.pop(0))
                pending.append((size, graph.execute(size)))
            for each in pending:
                _check(*each)
    victim = others[0]
    graph = dag.compile()
    _check(5, graph.execute(5))
    os.kill(crossfade.get(victim.pid.remote()), 9)
    dies(partial(run, graph, 5), victim._info.id, within_s=6.0)
    graph.teardown()
    for actor in (first, *others[1:]):
        crossfade.kill(actor)


def _check(size: int, references: Any) -> None:
    total = size * (size - 1) // 2
    assert crossfade.get(references, timeout=30) == [2 * total, total, total, total]
