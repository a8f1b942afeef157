"""What a training step will take: a schedule's order as a plan, simulated with the stages' measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from crossfade.errors import GraphError, UnknownTransport
from crossfade.hints import nearest
from crossfade.pipelines.lowering import id_of, method_of, plan_of, rank_name
from crossfade.pipelines.orders import Kind, Pass, order_of, passes_of
from crossfade.pipelines.report import StageReport
from crossfade.pipelines.timing import PassTime
from crossfade.plan.plan import Plan
from crossfade.plan.spans import COMPUTE
from crossfade.plan.timeline import NOTHING, Timeline
from crossfade.plan.validate import validate
from crossfade.schedule.bounds import Bounds, overlaps_of, predict_bounds
from crossfade.schedule.cost import CostModel
from crossfade.schedule.placement import place
from crossfade.schedule.workload import Workload
from crossfade.topology import Topology
from crossfade.types import Transport

Passes: TypeAlias = Mapping[int, Sequence[Pass]]


@dataclass(frozen=True)
class Prediction:
    """A training step that was not run."""

    schedule: str
    """The schedule's name."""
    num_microbatches: int
    """Of one step."""
    plan: Plan
    """What each rank does; ``print(prediction.plan)`` shows it."""
    timeline: Timeline
    """When, of the type that measured timelines have."""
    step_us: float
    """From the first pass to the end of the last, in microseconds. The optimizer's step is not in it."""
    bubbles: tuple[float, ...]
    """For each rank the share of the step in which it computes nothing."""
    exposed_us: tuple[float, ...]
    """For each rank how long it communicates and does not compute, in microseconds."""
    bounds: Bounds
    """Which ranks and which links the step is bound by, and how busy each is."""
    memory_bytes: tuple[int, ...]
    """For each rank the most that it holds: parameters, gradients, buffers, and the activations that are alive at once."""

    @property
    def num_ranks(self) -> int:
        """How many ranks it has."""
        return len(self.bubbles)


def predict(
    stages: Sequence[StageReport],
    schedule: str,
    num_microbatches: int,
    num_ranks: int | None,
    device: torch.device,
    costs: CostModel | None = None,
    transport: Transport | str | None = None,
    topology: Topology | None = None,
) -> Prediction:
    """See `crossfade.pipelines.Split.predict`."""
    order = order_of(schedule, len(stages), num_microbatches, num_ranks)
    passes = passes_of(order)
    _check_divided(stages, schedule, passes)
    is_cuda = device.type == "cuda"
    how = _transport(transport) if transport else (Transport.COPY if is_cuda else Transport.SHM)
    if topology is None and how is Transport.TCP:
        raise GraphError("values go by 'tcp' between hosts, and there is one", hint="describe a cluster: topology=...")
    booked = {rank_name(rank): (rank,) if is_cuda else () for rank in sorted(order)}
    places = None if topology is None else place(topology, booked)
    gpus = {rank: places.gpus[rank_name(rank)][0] if places else rank for rank in order} if is_cuda else None
    plan = plan_of(order, how, gpus, places.hosts if places else None)
    validate(plan)
    times = _times(stages, passes)
    workload = Workload(
        compute_us={method: time.host_us for method, time in times.items()},
        device_us={method: time.device_us for method, time in times.items()} if is_cuda else {},
        value_bytes={id_of(each): _size(stages, each) for mine in passes.values() for each in mine},
    )
    costs = costs or host_costs(num_cores=2 * len(order))
    if topology is not None:
        costs = replace(costs, topology=topology)
    timeline, bounds = predict_bounds(plan, workload, costs)
    names = [rank_name(rank) for rank in sorted(order)]
    spans = [span for span in timeline.spans if span.kind == COMPUTE]
    step_us = max(span.end_us for span in spans) - min(span.start_us for span in spans)
    by_actor = overlaps_of(timeline)
    overlaps = [by_actor.get(name, NOTHING) for name in names]
    return Prediction(
        schedule=schedule,
        num_microbatches=num_microbatches,
        plan=plan,
        timeline=timeline,
        step_us=step_us,
        bubbles=tuple(max(0.0, 1 - each.compute_us / step_us) for each in overlaps),
        exposed_us=tuple(each.exposed_us for each in overlaps),
        bounds=bounds,
        memory_bytes=tuple(_peak_bytes(stages, passes[rank]) for rank in sorted(order)),
    )


def _transport(asked: str) -> Transport:
    names = [each.value for each in Transport if each is not Transport.COMMUNICATOR]
    if asked not in names:
        hint = nearest(str(asked), names, f"the transports are {', '.join(names)}")
        raise UnknownTransport(f"there is no transport {str(asked)!r} between ranks", hint=hint)
    return Transport(asked)


def host_costs(num_cores: int) -> CostModel:
    """What values cost the hosts of ranks, over `crossfade.p2p`: on CPUs the sender's thread copies a value, and so does the
    receiver's; for GPUs they enqueue a send and a receive.

    The figures of CPUs are those of two ranks that train on a virtual machine with two cores
    (`pipelines_2-core-vm_2026-11-24.md` of the reports): Python for a tensor of each side, and 160 us a MB for a copy of memory
    that is in no cache. Those of GPUs were taken on a host of two H200 with 32 cores (`pipelines_2-nvidia-h200_2026-11-26.md`):
    what torch's schedules take for a batch of sends or receives.
    """
    return CostModel(
        num_cores=num_cores,
        write_us=40.0,
        write_us_per_mb=160.0,
        read_us=40.0,
        read_us_per_mb=160.0,
        push_host_us=200.0,
        accept_host_us=200.0,
    )


def _check_divided(stages: Sequence[StageReport], schedule: str, passes: Passes) -> None:
    is_divided = any(each.kind is Kind.BACKWARD_WEIGHT for mine in passes.values() for each in mine)
    if is_divided and any(stage.times.weight is None for stage in stages):
        raise GraphError(
            f"{schedule} divides the backward pass, and torch cannot divide that of these stages",
            hint="take a schedule that does not: GPipe, 1F1B, Interleaved1F1B",
        )


def _times(stages: Sequence[StageReport], passes: Passes) -> Mapping[str, PassTime]:
    """The time of each method of the plan."""
    used = {(each.kind, each.stage) for mine in passes.values() for each in mine}
    return {method_of(kind, stage): _time(stages[stage], kind) for kind, stage in sorted(used)}


def _time(stage: StageReport, kind: Kind) -> PassTime:
    times = stage.times
    return {
        Kind.FORWARD: times.forward,
        Kind.BACKWARD: times.backward,
        Kind.BACKWARD_INPUT: times.input or PassTime(),
        Kind.BACKWARD_WEIGHT: times.weight or PassTime(),
    }[kind]


def _size(stages: Sequence[StageReport], each: Pass) -> int:
    """The bytes that go out of a pass."""
    times = stages[each.stage].times
    if each.kind is Kind.FORWARD:
        return times.sent_bytes
    return times.returned_bytes if each.kind.sends_back else 0


def _peak_bytes(stages: Sequence[StageReport], passes: Sequence[Pass]) -> int:
    """The most that a rank holds. Activations stay until the whole backward pass, or its second part, is done."""
    held_bytes = sum(stages[stage].held_bytes for stage in {each.stage for each in passes})
    alive_bytes = most_bytes = 0
    for each in passes:
        size = stages[each.stage].times.activation_bytes
        if each.kind is Kind.FORWARD:
            alive_bytes += size
            most_bytes = max(most_bytes, alive_bytes)
        elif each.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            alive_bytes -= size
    return held_bytes + most_bytes
