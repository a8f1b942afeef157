"""The fake machine finds the faults that a device transport can have, each by name with its two operations, and none in the real
ring and the real staged copies, whatever is drawn: depths from 1 to 4, lengths, queues, streams, and the order of all steps.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.testing.fake import Verdict, sample
from crossfade.testing.fake.explore import World
from tests.helpers.worlds import rings as faults
from tests.helpers.worlds.kit import assert_sound, assert_sound_in_all_orders, orders
from tests.helpers.worlds.rings import RingWorld
from tests.helpers.worlds.staged import StagedWorld


def find(world: World, kind: str, *, is_strict: bool = True) -> Verdict:
    """The first fault of this kind, in orders drawn by seed; other kinds that the same fault shows as may come before it."""
    verdicts = [sample(world, [seed], is_strict=is_strict) for seed in range(30)]
    return next(verdict for verdict in verdicts if verdict.kind == kind)


def test_flag_before_data_is_found() -> None:
    found = find(RingWorld(sender=faults.FlagBeforeData, sizes_bytes=(16,)), "race")
    assert set(found.operations) == {
        "use value 0 on receiver/use 0",
        "copy bytes 0 to 16 of value 0 to slot 0 of ring a on sender/copies",
    }
    assert "slot 0 of ring a, " in str(found)


def test_reuse_before_free_is_found() -> None:
    found = find(RingWorld(sender=faults.ReuseBeforeFree, num_slots=1), "race")
    assert found.operations == (
        "copy bytes 0 to 16 of value 1 to slot 0 of ring a on sender/copies",
        "use value 0 on receiver/use 0",
    )


def test_a_missing_free_is_found() -> None:
    found = find(RingWorld(receiver=faults.MissingFree), "PL-5")
    assert found.operations == ("wait for free[0] of ring a on sender/copies", "set free[0] of ring a to 1")


def test_a_wait_before_its_producer_on_a_shared_queue_is_found() -> None:
    world = RingWorld(is_accepting_early=True, is_one_process=True, num_queues=1, sizes_bytes=(16,), num_slots=1)
    wait, write = "wait for full[0] of ring a on both/use 0", "set full[0] of ring a to 1"
    assert find(world, "PL-5").operations == (wait, write)
    stuck = find(world, "deadlock", is_strict=False)
    assert stuck.operations == (wait, f"{write} on both/copies")
    assert f"'{wait}' holds queue 0 of both in front of '{write} on both/copies', which it waits for" in str(stuck)


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_side_stream_that_does_not_rejoin_before_the_lease_ends_is_found(num_slots: int) -> None:
    found = find(RingWorld(side="forgotten", num_slots=num_slots), "race")
    assert found.operations == (
        f"copy bytes 0 to 16 of value {num_slots} to slot 0 of ring a on sender/copies",
        "use value 0 aside on receiver/side",
    )


def test_a_leaked_lease_is_found() -> None:
    found = find(RingWorld(is_leaking=True, num_kept=1, sizes_bytes=(16,)), "leak")
    assert "receiver has not ended its lease on slot 0 of ring a" in str(found)
    assert found.operations == (
        "copy bytes 0 to 16 of value 0 to slot 0 of ring a on sender/copies",
        "use value 0 on receiver/use 0",
    )


SEEDS = orders(10)
QUEUES = st.sampled_from([None, 1, 2, 3])

RINGS = st.builds(
    RingWorld,
    sizes_bytes=st.lists(st.sampled_from([0, 1, 16, 600, 700, 5_000]), min_size=1, max_size=7),
    num_slots=st.integers(1, 4),
    slot_bytes=st.sampled_from([0, 512]),
    num_kept=st.integers(0, 4),
    num_queues=QUEUES,
    is_one_process=st.booleans(),
    num_use_streams=st.integers(1, 3),
    side=st.sampled_from(["", "rejoins"]),
)

STAGED = st.builds(
    StagedWorld,
    sizes_bytes=st.lists(st.sampled_from([0, 3, 4096, 10_000, 20_000]), min_size=1, max_size=4),
    num_chunks=st.integers(2, 4),
    num_streams=st.sampled_from([1, 3]),
    num_queues=QUEUES,
)


@given(world=RINGS, seeds=SEEDS)
def test_the_real_ring_has_no_fault(world: RingWorld, seeds: range) -> None:
    assert_sound(world, seeds)


@given(world=STAGED, seeds=SEEDS)
def test_the_real_staged_copies_have_no_fault(world: StagedWorld, seeds: range) -> None:
    assert_sound(world, seeds)


@pytest.mark.parametrize(
    "world",
    [
        RingWorld(sizes_bytes=(16,), num_slots=1),
        RingWorld(sizes_bytes=(16, 16), num_slots=2),
        RingWorld(sizes_bytes=(16, 600), num_slots=1),
        RingWorld(sizes_bytes=(16,), num_slots=1, slot_bytes=0),
        RingWorld(sizes_bytes=(16, 16), num_slots=1, side="rejoins"),
        StagedWorld(sizes_bytes=(4097,), num_streams=1),
    ],
    ids=["ring of 1", "ring of 2", "ring that grows", "ring without slots", "rejoins", "staged"],
)
def test_a_small_world_has_no_fault_in_any_order(world: World) -> None:
    assert_sound_in_all_orders(world)
