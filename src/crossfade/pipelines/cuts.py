"""Where to cut: a list of operations into contiguous stages, so that the slowest stage is as short as possible. Pure code.

Operations are numbered in their topological order. Cut ``c`` lies before operation ``c``; ``n`` operations have the cuts ``1`` to
``n - 1``, of which only some are allowed. A stage ``[i, j)`` is feasible when its time and its memory are within the limits, and
then every part of it is feasible too. So for each end ``j`` there is one earliest start, all of them are found with two pointers,
and both searches below need nothing else:

- the shortest slowest stage: bisection over the time limit; whether a limit can be kept is seen by making each stage as long as
  it may be;
- among cuts whose slowest stage is at most ``tolerance`` longer than that, those that the fewest bytes cross: dynamic programming
  over (number of stages, cut), with a sliding minimum. O(num_stages * n).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from crossfade.errors import GraphError


@dataclass(frozen=True, slots=True)
class Operation:
    """What one operation costs the stage that has it."""

    time_us: float
    """Forward and backward, for one microbatch."""
    holds: Mapping[str, int] = field(default_factory=dict)
    """Bytes of what the stage must hold because of it, by name: a name that several operations of a stage have counts once."""


def choose_cuts(
    operations: Sequence[Operation],
    num_stages: int,
    crossing_bytes: Mapping[int, int],
    memory_limit_bytes: int | None = None,
    tolerance: float = 0.01,
) -> tuple[int, ...]:
    """Chooses ``num_stages - 1`` cuts, in ascending order.

    ``crossing_bytes`` has the cuts that are allowed, with the bytes that go over each. The slowest stage may be longer than
    necessary by ``tolerance`` (0.01: 1 %) for fewer bytes that cross. Raises a `GraphError` that says what is possible, if too
    few cuts are allowed, or no choice keeps the memory limit of each stage.
    """
    cuts = [0, *sorted(crossing_bytes), len(operations)]
    if num_stages - 1 > len(crossing_bytes):
        raise GraphError(
            f"{num_stages} stages need {num_stages - 1} cuts, and the module can be cut in {len(crossing_bytes)} places",
            hint="ask for fewer stages",
        )
    total_us = sum(each.time_us for each in operations)
    limit_bytes = math.inf if memory_limit_bytes is None else memory_limit_bytes
    if _num_needed(cuts, _starts(operations, math.inf, limit_bytes)) > num_stages:
        raise GraphError(
            f"no {num_stages} stages keep within {memory_limit_bytes:,} bytes each: the largest would have at least "
            f"{_smallest_bytes(operations, cuts, num_stages):,}",
            hint="ask for more stages, give a smaller microbatch, or raise memory_limit_bytes",
        )
    low_us, high_us = 0.0, total_us
    while high_us - low_us > 1e-9 * total_us:
        middle_us = (low_us + high_us) / 2
        if _num_needed(cuts, _starts(operations, middle_us, limit_bytes)) <= num_stages:
            high_us = middle_us
        else:
            low_us = middle_us
    starts = _starts(operations, high_us * (1 + tolerance) + 1e-9 * total_us, limit_bytes)
    return _fewest_bytes(cuts, starts, num_stages, crossing_bytes)


def stages_of(cuts: Sequence[int], num_operations: int) -> list[range]:
    """The operations of each stage."""
    return [range(start, end) for start, end in pairwise([0, *cuts, num_operations])]


def _starts(operations: Sequence[Operation], limit_us: float, limit_bytes: float) -> list[int]:
    """For each end ``j`` the earliest ``i`` with which the stage ``[i, j)`` keeps both limits; ``j`` if none does."""
    until_us = [0.0, *accumulate(each.time_us for each in operations)]
    starts, start, held_bytes = [0], 0, 0
    num_users: Counter[str] = Counter()
    for end, operation in enumerate(operations, start=1):
        for name, size in operation.holds.items():
            held_bytes += 0 if num_users[name] else size
            num_users[name] += 1
        while start < end and (until_us[end] - until_us[start] > limit_us or held_bytes > limit_bytes):
            for name, size in operations[start].holds.items():
                num_users[name] -= 1
                held_bytes -= 0 if num_users[name] else size
            start += 1
        starts.append(start)
    return starts


def _num_needed(cuts: Sequence[int], starts: Sequence[int]) -> float:
    """The fewest stages with which every stage is feasible; infinity where one between neighbouring cuts is not."""
    num, start = 1, 0
    for before, after in pairwise(cuts):
        if starts[after] > before:
            return math.inf
        if starts[after] > start:
            num, start = num + 1, before
    return num


def _smallest_bytes(operations: Sequence[Operation], cuts: Sequence[int], num_stages: int) -> int:
    """The smallest memory limit that can be kept."""
    low, high = 0, sum(size for each in operations for size in each.holds.values())
    while low < high:
        middle = (low + high) // 2
        if _num_needed(cuts, _starts(operations, math.inf, middle)) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _fewest_bytes(
    cuts: Sequence[int], starts: Sequence[int], num_stages: int, crossing_bytes: Mapping[int, int]
) -> tuple[int, ...]:
    """The cuts into exactly that many feasible stages that the fewest bytes cross."""
    best = [0.0, *[math.inf] * (len(cuts) - 1)]
    chosen: list[list[int]] = []
    for _ in range(num_stages):
        best, before = _with_one_more(cuts, starts, best, crossing_bytes)
        chosen.append(before)
    place, found = len(cuts) - 1, []
    for before in reversed(chosen):
        place = before[place]
        found.append(cuts[place])
    return tuple(reversed(found[:-1]))


def _with_one_more(
    cuts: Sequence[int], starts: Sequence[int], best: Sequence[float], crossing_bytes: Mapping[int, int]
) -> tuple[list[float], list[int]]:
    """For each cut the fewest bytes when one more stage ends there, and the place of the cut where that stage begins."""
    result, before = [math.inf], [0]
    window: deque[int] = deque()  # places of earlier cuts, with growing ``best``
    for place, cut in enumerate(cuts[1:], start=1):
        while window and best[window[-1]] >= best[place - 1]:
            window.pop()
        window.append(place - 1)
        while window and cuts[window[0]] < starts[cut]:
            window.popleft()
        least = best[window[0]] if window else math.inf
        result.append(least + crossing_bytes.get(cut, 0))
        before.append(window[0] if window else 0)
    return result, before
