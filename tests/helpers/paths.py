"""When the outputs of a graph have to be there: random graphs with slow and failing methods, and how long each path takes.

A path is as long as the methods on it, and as those that its actors run before, since an actor runs one method after another. It
ends early where a method fails: what takes the error fails as soon as its own actor has come to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import crossfade
from crossfade.plan.actions import Verb
from crossfade.plan.plan import NodeSpec, Plan
from crossfade.types import DRIVER
from tests.helpers.calm import calm_s

LATE_S = 0.05
"""How much later than its path's end an output may be."""
_DELAYS_S = (0.0, 0.0, 0.0, 0.09, 0.18)
_NUM_ACTORS = 3


class PathWorker:
    """An actor whose methods take a given time, and fail or not."""

    def step(self, name: str, delay_s: float, fails: bool, *values: object) -> str:
        """Its name and those of what it was given."""
        time.sleep(delay_s)
        if fails:
            raise KeyError(name)
        return f"{name}({', '.join(map(str, values))})"


@dataclass(frozen=True)
class Steps:
    """One method call: on which actor, of which earlier values (0 is the input), how slow, whether it fails."""

    actor: int
    sources: tuple[int, ...]
    delay_s: float
    fails: bool


@dataclass(frozen=True)
class PathDraw:
    """A graph: its calls, and which of their values are outputs, beside those that nobody takes."""

    calls: tuple[Steps, ...]
    outputs: frozenset[int]
    depth: int


@st.composite
def draws(draw: st.DrawFn) -> PathDraw:
    calls = []
    for number in range(draw(st.integers(2, 7))):
        sources = draw(st.lists(st.integers(0, number), min_size=1, max_size=3, unique=True))
        delay_s = draw(st.sampled_from(_DELAYS_S))
        fails = draw(st.sampled_from((False, False, True)))
        calls.append(Steps(draw(st.integers(0, _NUM_ACTORS - 1)), tuple(sources), delay_s, fails))
    used = {source for call in calls for source in call.sources}
    kept = draw(st.lists(st.integers(1, len(calls)), max_size=2))
    outputs = {number for number in range(1, len(calls) + 1) if number not in used}.union(kept)
    return PathDraw(tuple(calls), frozenset(outputs), draw(st.integers(1, 3)))


def bind_path(draw: PathDraw, actors: list[crossfade.ActorHandle]) -> crossfade.MultiOutputNode:
    values = [crossfade.InputNode()]
    for number, call in enumerate(draw.calls, 1):
        sources = [values[source] for source in call.sources]
        values.append(actors[call.actor].step.bind(f"m{number}", call.delay_s, call.fails, *sources))
    return crossfade.MultiOutputNode([values[number] for number in sorted(draw.outputs)])


def arrivals(graph: crossfade.CompiledGraph) -> list[tuple[float, float]]:
    """Executes once. After how many seconds each output was ready: by the clock, and by one that is slow on a busy machine."""
    refs = graph.execute("x")
    start_s, calm_start_s = time.monotonic(), calm_s()
    found: dict[Any, tuple[float, float]] = {}
    rest = refs
    while rest:
        ready, rest = crossfade.wait(rest, timeout=30)
        assert ready, f"{rest} did not come"
        found.update(dict.fromkeys(ready, (time.monotonic() - start_s, calm_s() - calm_start_s)))
    return [found[ref] for ref in refs]


def path_ends(plan: Plan, draw: PathDraw) -> list[tuple[float, bool]]:
    """Of each output, when its path ends, in seconds, and whether it is an error then."""
    ends = _Ends(plan, draw)
    return [ends.written[value] for value in plan.outputs]


class _Ends:
    """Goes through the programs of all actors again and again, until the times are those of the rounds before."""

    def __init__(self, plan: Plan, draw: PathDraw) -> None:
        self._plan = plan
        self._calls: Mapping[str, Steps] = {f"n{index}": call for index, call in enumerate(draw.calls)}
        self.written: dict[str, tuple[float, bool]] = {each.value: (0.0, False) for each in plan.inputs}
        before: dict[str, tuple[float, bool]] = {}
        while before != self.written:
            before = dict(self.written)
            for actor in plan.programs:
                if actor != DRIVER:
                    self._go_through(actor)

    def _go_through(self, actor: str) -> None:
        now_s = 0.0
        here: dict[str, tuple[float, bool]] = {}  # what this actor has made
        for action in self._plan.programs[actor]:
            if action.verb is Verb.RUN:
                node = self._plan.node[action.target]
                now_s, failed = self._run(node, now_s, here)
                here.update(dict.fromkeys(node.outputs, (now_s, failed)))
                self.written.update(here)

    def _run(self, node: NodeSpec, now_s: float, here: Mapping[str, tuple[float, bool]]) -> tuple[float, bool]:
        """When it ends, and whether it has failed: as soon as an input is an error, or when all are there and it has run."""
        inputs = [here.get(value) or self.written.get(value, (math.inf, False)) for value in node.inputs]
        error_s = min((at_s for at_s, failed in inputs if failed), default=math.inf)
        all_s = max((at_s for at_s, _ in inputs), default=0.0)
        if error_s < math.inf:
            return max(now_s, error_s), True
        call = self._calls[node.id]
        return max(now_s, all_s) + call.delay_s, call.fails


def is_late(plan: Plan, draw: PathDraw, found: list[tuple[float, float]]) -> str:
    """What came too late, or before it could be there; empty if nothing did."""
    for number, ((end_s, failed), (clock_s, calm)) in enumerate(zip(path_ends(plan, draw), found, strict=True)):
        if calm > end_s + LATE_S or clock_s < end_s - 1e-3:
            return f"output {number} ({failed=}) came after {clock_s:.3f} s ({calm:.3f} s), and its path takes {end_s:.3f} s"
    return ""
