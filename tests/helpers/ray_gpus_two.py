"""GPU actors on two Ray nodes of this machine, with a GPU each: what goes between them goes by NCCL. Prints what became of it."""

from __future__ import annotations

import json
from typing import Any

import crossfade
from tests.helpers.ray_world import World


class Worker:
    """Makes tensors on its GPU, and says where it got some."""

    def make(self, size: int) -> Any:
        import torch

        return torch.arange(size, device="cuda", dtype=torch.float32)

    def double(self, value: Any) -> Any:
        return value * 2

    def told(self, value: Any) -> tuple[str, float]:
        return value.device.type, float(value.double().sum())


def main() -> None:
    world = World(has_gpus=True)
    first, second = (world.make(Worker, is_far=is_far, num_gpus=1) for is_far in (False, True))
    said: dict[str, Any] = {}
    with crossfade.InputNode() as inp:
        made = first.make.bind(inp)
        reduced = crossfade.collective.allreduce.bind([made, second.double.bind(made)])
        ends = [
            second.told.bind(made),
            *(actor.told.bind(each) for actor, each in zip((first, second), reduced, strict=True)),
        ]
        graph = crossfade.MultiOutputNode(ends).compile()
    said["devices"] = [graph.plan.devices[actor._info.id] for actor in (first, second)]
    said["transports"] = sorted({str(spec.transport) for spec in graph.plan.channels if spec.value == "n0"})
    said["collective"] = str(graph.plan.collectives[0].transport)
    said["results"] = [crossfade.get(graph.execute(size), timeout=60) for size in (1, 1000, 1_000_000, 3)]
    graph.teardown()
    crossfade.shutdown()
    print(json.dumps(said), flush=True)
    world.ray.shutdown()
    world.cluster.shutdown()


if __name__ == "__main__":
    main()
