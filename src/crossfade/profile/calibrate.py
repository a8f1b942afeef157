"""A whole calibration: step after step, what each gives kept as it comes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfade.profile.crew import Crew, StepFailed
from crossfade.profile.steps import Step
from crossfade.topology import Crowd, Launch, Rate, Slowdown, Topology

LIMIT_S = 110.0
"""No step begins later."""
MOST_FAILURES = 2
"""After so many, steps that measure the same thing by the same means are left out."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a calibration is, after a step."""

    step: Step  # the one that is over
    topology: Topology  # with all that was measured until then
    num_done: int  # steps that are over
    problem: str = ""  # why the step gave nothing; empty if it gave something


def start_from(found: Topology, kept: Topology | None) -> Topology:
    """What is known before anything is measured: the figures that were kept, if they are of the same devices and links."""

    def ends(topology: Topology) -> set[tuple[str, str, str]]:
        return {(link.source, link.target, link.kind.value) for link in topology.links}

    if kept is None or set(kept.devices) != set(found.devices) or ends(kept) != ends(found):
        return found
    links = {(link.source, link.target): link for link in kept.links}
    return Topology(
        found.devices,
        tuple(links[link.source, link.target] for link in found.links),
        kept.slowdowns,
        kept.crowds,
        kept.launches,
    )


def calibrate(
    topology: Topology,
    steps: Sequence[Step],
    crew: Crew,
    *,
    limit_s: float = LIMIT_S,
    clock_s: Callable[[], float] = time.monotonic,
    before: Callable[[Step], None] = lambda step: None,
) -> Generator[Progress, None, None]:
    """Measures, and tells after each step; a step that fails does not stop the others. The crew is closed at the end. No step
    begins later than ``limit_s`` by ``clock_s``; ``before`` is called with each that begins.
    """
    deadline_s = clock_s() + limit_s
    failures: Counter[tuple[str, str]] = Counter()
    try:
        for number, step in enumerate(steps, 1):
            problem = ""
            if failures[step.kind] >= MOST_FAILURES:
                problem = "left out: the same failed before"
            elif clock_s() >= deadline_s:
                problem = f"left out: {limit_s:g} s are over"
            else:
                before(step)
                try:
                    topology = _fold(topology, step, crew.run(step))
                except StepFailed as error:
                    failures[step.kind] += 1
                    problem = str(error)
            yield Progress(step, topology, number, problem)
    finally:
        crew.close()


def _fold(topology: Topology, step: Step, result: Any) -> Topology:
    """The topology with what a step measured, in the place of what was known."""
    uuids = [device.uuid for device in topology.devices]
    match step.measure:
        case "launch":
            for operation, duration_us in result.items():
                topology = topology.with_launch(Launch(uuids[step.ranks[0]], operation, duration_us))
        case "signals":
            one, other = (uuids[rank] for rank in step.ranks)
            for ends in ((one, other), (other, one)):  # there and back was measured, so both ways count half
                topology = topology.with_link(replace(topology.link(*ends), signal_us=result))
        case "transfers":
            transfers = tuple((uuids[source], uuids[target]) for source, target in step.transfers)
            topology = _with_transfers(topology, step.transport, transfers, result)
        case "beside":
            slowdown = Slowdown(step.transport, step.work, result["communication"], result["computation"])
            topology = topology.with_slowdown(slowdown)
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
