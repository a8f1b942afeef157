"""What a step gave becomes part of a topology. Pure."""

from __future__ import annotations

from typing import Any

from crossfade.profile.steps import Step
from crossfade.topology import Crowd, Launch, Link, Rate, Slowdown, Topology

__all__ = ["fold"]


def fold(topology: Topology, step: Step, result: Any) -> Topology:
    """The topology with what a step measured, in the place of what was known."""
    uuids = [device.uuid for device in topology.devices]
    match step.measure:
        case "launch":
            for operation, duration_us in result.items():
                topology = topology.with_launch(Launch(uuids[step.ranks[0]], operation, duration_us))
        case "signals":
            topology = _with_signal(topology, [uuids[rank] for rank in step.ranks], result)
        case "transfers":
            transfers = tuple((uuids[source], uuids[target]) for source, target in step.transfers)
            topology = _with_transfers(topology, step.transport, transfers, result)
        case "beside":
            slowdown = Slowdown(step.transport, step.work, result["communication"], result["computation"])
            topology = topology.with_slowdown(slowdown)
    return topology


def _with_signal(topology: Topology, ends: list[str], signal_us: float) -> Topology:
    """There and back was measured, so both ways count half."""
    for source, target in (ends, ends[::-1]):
        link = topology.link(source, target)
        topology = topology.with_link(Link(link.source, link.target, link.kind, link.rates, signal_us))
    return topology


def _with_transfers(
    topology: Topology, transport: str, transfers: tuple[tuple[str, str], ...], rows: list[tuple[int, float]]
) -> Topology:
    if len(transfers) == 1:
        link = topology.link(*transfers[0])
        return topology.with_link(link.with_rates(Rate(transport, size, time_us) for size, time_us in rows))
    for size_bytes, duration_us in rows:
        topology = topology.with_crowd(Crowd(transport, transfers, size_bytes, duration_us))
    return topology
