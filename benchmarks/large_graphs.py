"""Large graphs of one actor class, to be planned and predicted: pipelines, data parallelism, fan-outs.

A pipeline of S stages goes through M microbatches, forwards, or forwards and backwards; stage s of microbatch m waits for stage s -
1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import crossfade
from crossfade.collective import allreduce

__all__ = [
    "GRAPHS",
    "Stage",
    "data_parallel",
    "fan_out",
    "forward_through",
    "pipeline",
    "train_through",
    "training_pipeline",
]


class Stage:
    """An actor of all graphs. Nothing here is called when a graph is planned."""

    def forward(self, x: Any, *_: Any) -> Any:
        return x

    def backward(self, x: Any, *_: Any) -> Any:
        return x


def make_stages(num: int, kind: type[Stage] = Stage, num_gpus: int = 0) -> list[Any]:
    """So many actors."""
    stage = crossfade.remote(num_gpus=num_gpus)(kind)
    return [stage.remote() for _ in range(num)]


def pipeline(num_stages: int, num_microbatches: int, kind: type[Stage] = Stage, num_gpus: int = 0) -> Any:
    """Forward passes alone."""
    return forward_through(make_stages(num_stages, kind, num_gpus), num_microbatches)


def forward_through(stages: Sequence[Any], num_microbatches: int) -> Any:
    """A pipeline of these actors."""
    num_stages = len(stages)
    with crossfade.InputNode() as inp:
        values = [inp] * num_microbatches
        for step in range(num_stages + num_microbatches - 1):
            for microbatch in range(num_microbatches):
                if 0 <= step - microbatch < num_stages:
                    values[microbatch] = stages[step - microbatch].forward.bind(values[microbatch])
    return crossfade.MultiOutputNode(values)


def training_pipeline(num_stages: int, num_microbatches: int, kind: type[Stage] = Stage, num_gpus: int = 0) -> Any:
    """All forward passes, then all backward passes (GPipe)."""
    return train_through(make_stages(num_stages, kind, num_gpus), num_microbatches)


def train_through(stages: Sequence[Any], num_microbatches: int) -> Any:
    """A training pipeline of these actors."""
    num_stages = len(stages)
    kept: dict[tuple[int, int], Any] = {}
    with crossfade.InputNode() as inp:
        values = [inp] * num_microbatches
        for step in range(num_stages + num_microbatches - 1):
            for microbatch in range(num_microbatches):
                stage = step - microbatch
                if 0 <= stage < num_stages:
                    values[microbatch] = kept[stage, microbatch] = stages[stage].forward.bind(values[microbatch])
        for step in range(num_stages + num_microbatches - 1):
            for microbatch in range(num_microbatches):
                stage = num_stages - 1 - (step - microbatch)
                if 0 <= stage < num_stages:
                    values[microbatch] = stages[stage].backward.bind(values[microbatch], kept[stage, microbatch])
    return crossfade.MultiOutputNode(values)


def data_parallel(num_replicas: int, num_layers: int, kind: type[Stage] = Stage, num_gpus: int = 0) -> Any:
    """Each replica computes a gradient for each layer, and all replicas sum it."""
    replicas = make_stages(num_replicas, kind, num_gpus)
    with crossfade.InputNode() as inp:
        gradients = [inp] * num_replicas
        summed: list[Any] = []
        for _ in range(num_layers):
            gradients = [each.backward.bind(value) for each, value in zip(replicas, gradients, strict=True)]
            summed.append(allreduce.bind(gradients))
        ends = [each.forward.bind(*(layer[rank] for layer in summed)) for rank, each in enumerate(replicas)]
    return crossfade.MultiOutputNode(ends)


def fan_out(num_readers: int, num_values: int, kind: type[Stage] = Stage, num_gpus: int = 0) -> Any:
    """One actor's values go to all others, whose answers come back to it."""
    head, *readers = make_stages(num_readers + 1, kind, num_gpus)
    with crossfade.InputNode() as inp:
        value = inp
        for _ in range(num_values):
            made = head.forward.bind(value)
            value = head.backward.bind(*(each.forward.bind(made) for each in readers))
    return value


GRAPHS: dict[str, Callable[..., Any]] = {
    "pipeline": pipeline,
    "training pipeline": training_pipeline,
    "data parallel": data_parallel,
    "fan-out": fan_out,
}
"""By name: from numbers of actors, and of microbatches (layers, values)."""
