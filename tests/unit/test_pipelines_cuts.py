"""Where to cut: against brute force over all choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.errors import GraphError
from crossfade.pipelines.cuts import Operation, choose_cuts, stages_of

NAMES = st.dictionaries(st.sampled_from("abcde"), st.just(0), max_size=3)
SIZES = {name: 10 * 2**place for place, name in enumerate("abcde")}


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Operation], int, dict[int, int], int | None]:
    num = draw(st.integers(1, 9))
    operations = [Operation(draw(st.integers(0, 20)), {name: SIZES[name] for name in draw(NAMES)}) for _ in range(num)]
    allowed = draw(st.sets(st.integers(1, max(1, num - 1)), max_size=num - 1)) if num > 1 else set()
    crossing = {cut: draw(st.integers(0, 5)) for cut in sorted(allowed)}
    limit = draw(st.none() | st.integers(0, 400))
    return operations, draw(st.integers(1, 4)), crossing, limit


def time_us(operations: Sequence[Operation], stage: range) -> float:
    return sum(operations[place].time_us for place in stage)


def held_bytes(operations: Sequence[Operation], stage: range) -> int:
    return sum({name: size for place in stage for name, size in operations[place].holds.items()}.values())


def all_choices(
    operations: Sequence[Operation], num_stages: int, crossing: dict[int, int], limit: int | None
) -> list[tuple[float, int, tuple[int, ...]]]:
    """The slowest stage's time, the bytes that cross, and the cuts, of all choices that keep the limit."""
    found = []
    for cuts in combinations(sorted(crossing), num_stages - 1):
        stages = stages_of(cuts, len(operations))
        if all(held_bytes(operations, stage) <= (math.inf if limit is None else limit) for stage in stages):
            slowest = max(time_us(operations, stage) for stage in stages)
            found.append((slowest, sum(crossing[cut] for cut in cuts), cuts))
    return found


@settings(max_examples=400, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.1]))
def test_the_slowest_stage_is_the_shortest_and_then_the_fewest_bytes_cross(
    problem: tuple[list[Operation], int, dict[int, int], int | None], tolerance: float
) -> None:
    operations, num_stages, crossing, limit = problem
    choices = all_choices(operations, num_stages, crossing, limit)
    if not choices:
        with pytest.raises(GraphError):
            choose_cuts(operations, num_stages, crossing, limit, tolerance)
        return
    cuts = choose_cuts(operations, num_stages, crossing, limit, tolerance)
    shortest = min(choices)[0]
    slowest, crossed, _ = next(choice for choice in choices if choice[2] == cuts)
    assert slowest <= shortest * (1 + tolerance) + 1e-6
    assert crossed == min(b for us, b, _ in choices if us <= shortest * (1 + tolerance) + 1e-7)


def test_a_limit_that_cannot_be_kept_says_which_could() -> None:
    operations = [Operation(1.0, {"a": 10}), Operation(1.0, {"b": 30}), Operation(1.0, {"b": 30, "c": 5})]
    with pytest.raises(GraphError, match=r"34 bytes each: the largest would have at least 35\nhint: ask for more"):
        choose_cuts(operations, 2, {1: 0, 2: 0}, 34)
    assert choose_cuts(operations, 2, {1: 0, 2: 0}, 35) == (1,)


def test_more_stages_than_places_are_refused() -> None:
    with pytest.raises(GraphError, match="3 stages need 2 cuts, and the module can be cut in 1 places"):
        choose_cuts([Operation(1.0), Operation(1.0)], 3, {1: 0})


def test_many_operations_take_no_long_search() -> None:
    operations = [Operation(1.0 + place % 7, {f"p{place // 3}": 8}) for place in range(3000)]
    cuts = choose_cuts(operations, 8, dict.fromkeys(range(1, 3000), 1), tolerance=0.0)
    times = [time_us(operations, stage) for stage in stages_of(cuts, 3000)]
    assert max(times) <= sum(times) / 8 + 7
