"""Writers that wait for their turn never stop, in any order of steps; and what would make them stop is found."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.testing.fake import explore, sample
from tests.helpers.turn_worlds import HastyProgress, TurnWorld

NUM_ORDERS = 3
"""Orders of steps that are tried of each world that hypothesis draws."""


def test_two_writers_in_all_orders_of_steps() -> None:
    world = TurnWorld(orders=((0, 1),), sizes_bytes=((16, 16),), is_read=False)
    verdict = explore(world)
    assert verdict.is_ok, verdict
    assert verdict.is_complete
    assert world.num_waits
    assert world.num_holds


@pytest.mark.parametrize("num_queues", [None, 1])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_three_writers_and_two_plans_with_orders_that_cross(num_slots: int, num_queues: int | None) -> None:
    world = TurnWorld(((0, 1, 2), (2, 1, 0)), ((16, 16, 16),) * 4, num_slots, num_queues)
    verdict = sample(world, range(150))
    assert verdict.is_ok, verdict
    assert world.num_waits > 100
    assert world.num_holds > 100


ORDERS = st.sampled_from(list(itertools.permutations(range(3))))
SIZES = st.tuples(*[st.sampled_from([0, 8, 16, 24])] * 3)


@given(
    orders=st.lists(ORDERS, min_size=1, max_size=3),
    sizes_bytes=st.lists(SIZES, min_size=1, max_size=5),
    num_slots=st.integers(1, 3),
    num_queues=st.sampled_from([None, 1, 2]),
    first=st.integers(0, 1 << 32),
)
def test_any_plans_of_three_writers(
    orders: list[tuple[int, ...]],
    sizes_bytes: list[tuple[int, ...]],
    num_slots: int,
    num_queues: int | None,
    first: int,
) -> None:
    world = TurnWorld(orders, sizes_bytes, num_slots, num_queues)
    verdict = sample(world, range(first, first + NUM_ORDERS))
    assert verdict.is_ok, verdict


def test_a_wait_for_what_is_not_enqueued_is_found() -> None:
    """Across two plans it is a circle: each writer waits on its one stream for what is behind the other's wait."""
    world = TurnWorld(((0, 1), (1, 0)), ((16, 16),), progress=HastyProgress)
    assert sample(world, range(50)).kind == "PL-5"
    verdicts = [sample(world, [seed], is_strict=False) for seed in range(50)]
    assert "deadlock" in {verdict.kind for verdict in verdicts}
