"""What bounds a prediction: which actors and which links its critical path leads through, and how busy each of them is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from crossfade.intervals import union_us
from crossfade.plan.actions import MAIN
from crossfade.plan.plan import Plan
from crossfade.plan.spans import COMPUTE, WAIT, Overlap, Span
from crossfade.plan.timeline import NOTHING, Timeline
from crossfade.schedule.causes import LINK, Piece
from crossfade.schedule.cost import CostModel
from crossfade.schedule.simulate import Simulation
from crossfade.schedule.workload import Workload
from crossfade.types import DRIVER


@dataclass(frozen=True, slots=True)
class Bound:
    """An actor or a link, and how much of the step it bounds."""

    name: str
    """The actor; or where values go, such as ``node0 -> node1``; or what a collective is."""
    share: float
    """Share of the predicted time in which the critical path leads through it: an actor's computing, a link's moving."""
    busy: float
    """Share in which it is busy at all: in which the actor computes, or the link moves something."""
    host: str = ""
    """Of an actor, where the plan has several hosts."""
    handling: float = 0.0
    """Of an actor: share in which the path leads through its own reads, writes and releases."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The shares of all actors and links; those of the critical path add up to 1."""

    step_us: float
    """The predicted time, from the first submission to the last end."""
    actors: tuple[Bound, ...]
    """Those that bound most come first."""
    links: tuple[Bound, ...]
    """Likewise; those over which nothing goes are left out."""
    waking: float
    """Share in which the path waits until a process has seen what it waits for: hops, waking up, a thread that is taken."""

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


def predict_bounds(
    plan: Plan, workload: Workload, costs: CostModel, num_executions: int = 1
) -> tuple[Timeline, Bounds]:
    """Simulates a plan, and says what bounds it. Errors: as `schedule.simulate.simulate`."""
    simulation = Simulation(plan, workload, costs, num_executions)
    timeline = simulation.run()
    moves = [(each.where, each.start_us, each.end_us) for each in simulation.moves]
    return timeline, bounds_of(plan, timeline, simulation.critical_path(), moves)


def overlaps_of(timeline: Timeline) -> dict[str, Overlap]:
    """What each actor does: with its GPU, if that computes, and not with the host that enqueues for it."""
    spans: dict[str, dict[bool, list[Span]]] = defaultdict(
        lambda: {True: [], False: []}
    )  # by whether they are the host's
    for span in timeline.spans:
        spans[span.actor][span.stream == MAIN].append(span)
    found = {}
    for actor, each in spans.items():
        computes = any(span.kind == COMPUTE for span in each[False])
        found[actor] = Overlap.of(each[False] if computes else each[False] + each[True])
    return found


def bounds_of(
    plan: Plan, timeline: Timeline, path: Iterable[Piece], moves: Iterable[tuple[str, float, float]]
) -> Bounds:
    """Adds up the pieces of a critical path. ``moves`` has the link, start and end of all that moved."""
    pieces = list(path)
    step_us = (pieces[-1].end_us - pieces[0].start_us if pieces else 0.0) or 1.0
    on_path: dict[tuple[str, str], float] = defaultdict(float)
    for piece in pieces:
        on_path[piece.where, piece.kind] += (piece.end_us - piece.start_us) / step_us
    handling: dict[str, float] = defaultdict(float)
    for (where, kind), share in on_path.items():
        if kind not in (COMPUTE, LINK, WAIT):
            handling[where] += share
    busy_us: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for where, start_us, end_us in moves:
        busy_us[where].append((start_us, end_us))
    overlaps = overlaps_of(timeline)
    actors = [
        Bound(
            name=name,
            share=on_path.get((name, COMPUTE), 0.0),
            busy=overlaps.get(name, NOTHING).compute_us / step_us,
            host=plan.hosts.get(name, ""),
            handling=handling[name],
        )
        for name in plan.programs
    ]
    links = [Bound(name, on_path.get((name, LINK), 0.0), union_us(each) / step_us) for name, each in busy_us.items()]
    waking = sum(share for (_, kind), share in on_path.items() if kind == WAIT)
    return Bounds(
        step_us, _sorted(each for each in actors if each.name != DRIVER or each.handling), _sorted(links), waking
    )


def _sorted(bounds: Iterable[Bound]) -> tuple[Bound, ...]:
    return tuple(sorted(bounds, key=lambda each: (-each.share, -each.handling, -each.busy)))
