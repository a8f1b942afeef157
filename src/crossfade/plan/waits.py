"""Who waits for whom in a plan's rounds, and where that goes round in a circle (PL-2).

What a step waits for happens once and stays true, so all interleavings stop at the same place or none does. One stops
for ever exactly when a chain of waits leads from an event to itself in the same round or in a later one (a later one is
as bad: the party's own order, lag 1 a turn, leads back to the same round). That is a cycle of total lag 0 or less. No
lag is negative but for receives that run ahead on ``main``, or further than their ring is deep; without those, such a
cycle has only edges of lag 0, and one topological sort finds it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

Step = tuple[str, int]
"""The party's name, and the position in its program."""


@dataclass(slots=True)
class Waits:
    """Who waits for whom."""

    # the step of each event. A send or collective has a second one, its end, where it is on ``main``; a receive has one more, the
    # arrival of its value, and a collective one more, the meeting of all its parties.
    steps: list[Step] = field(default_factory=list)
    # for each event, by how many rounds it comes before the round of its execution.
    aheads: list[int] = field(default_factory=list)
    # (a, b, lag): event b of round t waits for event a of round t - lag.
    edges: list[tuple[int, int, int]] = field(default_factory=list)

    def event(self, step: Step, ahead: int) -> int:
        """Adds an event; gives its number."""
        self.steps.append(step)
        self.aheads.append(ahead)
        return len(self.steps) - 1

    def add(self, before: int, after: int, executions: int = 0) -> None:
        """``after`` of execution e waits for ``before`` of execution e - ``executions``."""
        self.edges.append((before, after, executions + self.aheads[before] - self.aheads[after]))

    def find_cycle(self) -> list[int]:
        """A cycle of lag 0 or less, or nothing: events of which each waits for the next, and the last for the first."""
        heights, last = self._heights()
        if last:
            return _walk_back(next(iter(last)), last)
        tight = [(a, b) for a, b, lag in self.edges if heights[a] + lag == heights[b]]
        if _all_happen(len(heights), tight):
            return []
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for a, b in tight:
            sorter.add(b, a)
        try:
            sorter.prepare()
        except CycleError as error:
            cycle: list[int] = error.args[1]  # each comes before the next one, and the first is the last one too
            return cycle[:0:-1]
        return []

    def _heights(self) -> tuple[list[int], dict[int, int]]:
        """For each event a height, such that no edge climbs by more than its lag: in a cycle of lag 0, each just by it.
        Where a cycle of negative lag makes that impossible: also, who waits for whom on the way into it.

        Heights are lengths of shortest paths. No path without a cycle is shorter than all negative lags together.
        """
        heights = [0] * len(self.steps)
        lowest = sum(lag for _, _, lag in self.edges if lag < 0)
        if not lowest:
            return heights, {}
        after: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for a, b, lag in self.edges:
            after[a].append((b, lag))
        before: dict[int, int] = {}
        num_steps = 0
        queue = deque(dict.fromkeys(a for a, _, lag in self.edges if lag < 0))
        queued = set(queue)
        while queue:
            a = queue.popleft()
            queued.discard(a)
            for b, lag in after[a]:
                if heights[a] + lag < heights[b]:
                    heights[b], before[b] = heights[a] + lag, a
                    if heights[b] < lowest:
                        return heights, {b: a, **before}
                    num_steps += 1
                    # Long before a height is too low, the way back from some event may lead to itself.
                    if num_steps % len(heights) == 0 and (turning := _find_on_cycle(before)) is not None:
                        return heights, {turning: before[turning], **before}
                    if b not in queued:
                        queued.add(b)
                        queue.append(b)
        return heights, {}


def _all_happen(num_events: int, edges: Sequence[tuple[int, int]]) -> bool:
    """Whether all events happen, where b of each edge (a, b) waits for a. A `TopologicalSorter` takes three times as long."""
    num_before = [0] * num_events
    after: list[list[int]] = [[] for _ in range(num_events)]
    for a, b in edges:
        after[a].append(b)
        num_before[b] += 1
    happened = [event for event, num in enumerate(num_before) if not num]
    for event in happened:  # which grows
        for b in after[event]:
            num_before[b] -= 1
            if not num_before[b]:
                happened.append(b)
    return len(happened) == num_events


def _find_on_cycle(before: Mapping[int, int]) -> int | None:
    """An event from which the way back leads to itself, if there is one."""
    walks: dict[int, int] = {}  # event: where the walk that came by it first began
    for start in before:
        event: int | None = start
        while event is not None and event not in walks:
            walks[event] = start
            event = before.get(event)
        if event is not None and walks[event] == start:
            return event
    return None


def _walk_back(event: int, before: Mapping[int, int]) -> list[int]:
    """The cycle into which the way back from an event leads."""
    places: dict[int, int] = {}
    while event not in places:
        places[event] = len(places)
        event = before[event]
    return list(places)[places[event] :]
