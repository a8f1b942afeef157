"""From a traced module to its cuts: measure operations, choose, measure the stages that this gives, choose again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from crossfade.pipelines.cuts import Operation, choose_cuts, stages_of
from crossfade.pipelines.graph import TracedGraph
from crossfade.pipelines.measure_operations import MeasuredOperations, measure_operations
from crossfade.pipelines.measure_stages import StageTimes, measure_stages, runnable_stages
from crossfade.pipelines.stages import cut_graph
from crossfade.pipelines.timing import Loss

MOST_LOOKS = 4
"""How often stages are measured before the best cuts so far are taken."""


@dataclass(frozen=True)
class Wish:
    """What the user asked for."""

    num_stages: int
    memory_limit_bytes: int | None
    num_alive: int  # microbatches whose activations a stage holds at once, for the memory limit
    num_passes: int
    tolerance: float


@dataclass(frozen=True)
class Look:
    """Cuts that were tried, and what their stages took."""

    cuts: tuple[int, ...]
    times: list[StageTimes]

    @property
    def slowest_us(self) -> float:
        """Forward and backward of the slowest stage."""
        return max(each.time_us for each in self.times)


def find_cuts(
    traced: TracedGraph, inputs: Sequence[torch.Tensor], loss: Loss, device: torch.device, wish: Wish
) -> list[Look]:
    """All cuts that were tried, in order, of which the one with the shortest slowest stage is to be taken. The graph is left as it
    is.

    The stages that a choice gives are measured as a whole, and the times of their operations corrected by that, until the
    choice is one that was tried already. Raises a `GraphError`, if there are too few cuts, or the memory limit cannot be kept.
    """
    measured = measure_operations(traced, inputs, loss, device, wish.num_passes)
    allowed = traced.allowed_cuts(measured.changed_buffers)
    holds = [_held(traced, measured, place, wish.num_alive) for place in range(len(traced.operations))]
    times_us = [each.forward_us + each.backward_us for each in measured.operations]
    looks: list[Look] = []
    while len(looks) < MOST_LOOKS:
        operations = [Operation(time_us, held) for time_us, held in zip(times_us, holds, strict=True)]
        cuts = choose_cuts(operations, wish.num_stages, allowed, wish.memory_limit_bytes, wish.tolerance)
        if any(look.cuts == cuts for look in looks):
            break
        candidate = _copy_of(traced)
        cut_graph(candidate, cuts)
        stages = runnable_stages(candidate.module)
        times = measure_stages(stages, tuple(inputs), loss, device, wish.num_passes, divides=False)
        looks.append(Look(cuts, times))
        for stage, seen in zip(stages_of(cuts, len(times_us)), times, strict=True):
            ratio = seen.time_us / max(1e-9, sum(times_us[place] for place in stage))
            for place in stage:
                times_us[place] *= ratio
    return looks


def _held(traced: TracedGraph, measured: MeasuredOperations, place: int, num_alive: int) -> dict[str, int]:
    """What a stage holds because of an operation: parameters with their gradients, buffers, activations of several microbatches."""
    held = {name: size * num_alive for name, size in measured.operations[place].saved.items()}
    for name, tensor in traced.attributes_of(place):
        held[name] = tensor.nbytes * (2 if tensor.requires_grad else 1)
    return held


def _copy_of(traced: TracedGraph) -> TracedGraph:
    """The same operations on the same parameters, in a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.module.graph, {}))
    return TracedGraph(fx.GraphModule(traced.module, graph))
