"""What the Ray engine does between two hosts (`tests.helpers.ray_two_hosts`), printed as JSON."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np

import crossfade
from crossfade.errors import ActorError
from tests.helpers.ray_two_hosts import Hosts, place

_NUM, _SIZE_BYTES = 5, 4_000_000


class Worker:
    """Gives back what it gets, and adds."""

    def same(self, value: Any) -> Any:
        return value

    def first(self, value: Any) -> int:
        return int(value[0])

    def ones(self, number: int) -> Any:
        import torch

        return torch.ones(number)

    def sum(self, value: Any) -> float:
        return float(value.sum())


def _cut(hosts: Hosts, graph: Any) -> tuple[str, float]:
    """What is said once the link is down, and after how long."""
    crossfade.get(graph.execute(np.zeros(1)))
    hosts.cut()
    start, error = time.monotonic(), ""
    try:
        while time.monotonic() - start < 60:
            crossfade.get(graph.execute(np.zeros(1)))
    except ActorError as raised:
        error = f"{type(raised).__name__}: {raised}"
    taken_s = time.monotonic() - start
    graph.teardown()
    return error, taken_s


def _reduce(hosts: Hosts, actors: list[Any]) -> tuple[list[float], float]:
    """What a collective between the hosts gives each of two actors, and how often its tensor leaves the first host."""
    with crossfade.InputNode() as inp:
        dag = crossfade.MultiOutputNode(
            [actor.sum.bind(each) for actor, each in zip(actors, _all_reduced(inp, actors), strict=True)]
        )
    with dag.compile() as graph:
        crossfade.get(graph.execute(1))
        before = hosts.num_bytes_sent()
        got = crossfade.get(graph.execute(_SIZE_BYTES // 4))
        return got, (hosts.num_bytes_sent() - before) / _SIZE_BYTES


def _all_reduced(inp: Any, actors: list[Any]) -> list[Any]:
    reduced: list[Any] = crossfade.collective.allreduce.bind([actor.ones.bind(inp) for actor in actors])
    return reduced


def main(hosts: Hosts) -> None:
    said: dict[str, Any] = {}
    with hosts.ray() as ray:
        actor = crossfade.remote(Worker)
        near = actor.options(scheduling_strategy=place(ray, 0)).remote()
        far = [actor.options(scheduling_strategy=place(ray, 1)).remote() for _ in range(3)]
        with crossfade.InputNode() as inp:
            value = near.same.bind(inp)
            graph = crossfade.MultiOutputNode([each.first.bind(value) for each in far]).compile()
        said["hosts"] = sorted(set(graph.plan.hosts.values()))
        before = hosts.num_bytes_sent()
        said["values"] = [crossfade.get(graph.execute(np.full(_SIZE_BYTES, k, np.uint8))) for k in range(_NUM)]
        said["times_crossed"] = (hosts.num_bytes_sent() - before) / (_NUM * _SIZE_BYTES)
        said["reduced"], said["times_reduced_crossed"] = _reduce(hosts, [near, far[0]])
        said["cuts"] = [_cut(hosts, graph)]
        with crossfade.InputNode() as inp:
            graph = near.first.bind(inp).compile()
        said["afterwards"] = graph.execute(np.full(1, 7)).get()
        for _ in range(int(os.environ.get("CUTS", "1")) - 1):
            hosts.mend()
            far = [actor.options(scheduling_strategy=place(ray, 1)).remote()]
            with crossfade.InputNode() as inp:
                graph = far[0].first.bind(near.same.bind(inp)).compile()
            said["cuts"].append(_cut(hosts, graph))
    print(json.dumps(said), flush=True)
