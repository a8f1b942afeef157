"""The fake machine finds the faults that lanes and exchanges can have, each by name with its two operations, and none in the real
ones, whatever is drawn: ranks, lanes, lengths, hardware queues, captures and replays, and the order of all steps.

Waits for other ranks may be enqueued before what they wait for (that is another host's business), so PL-5 is asked for by its
meaning: no deadlock in any order, on any number of hardware queues.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.peers import steps
from crossfade.peers.lane import SLOT_ALIGNMENT, Lane
from crossfade.testing.fake import FakeDriver, Fault, Machine, Verdict, sample
from crossfade.testing.fake.explore import World
from tests.helpers.counts import num
from tests.helpers.worlds import lane_faults as faults
from tests.helpers.worlds.kit import assert_sound, assert_sound_in_all_orders, kinds, orders
from tests.helpers.worlds.ranks import Call, Collective, PeerWorld, Round


@st.composite
def peer_worlds(draw: st.DrawFn) -> PeerWorld:
    """One to four ranks, up to three lanes, eager rounds and replays.

    Where hardware queues are shared, all ranks enqueue the calls in one order; where they are not, only those of one lane. What is
    captured keeps each lane on a stream of its own, since a lane orders streams only outside of captures.
    """
    num_ranks = draw(st.integers(1, 4))
    num_lanes = draw(st.integers(1, 3))
    num_queues = draw(st.sampled_from([None, None, 1, 2, 3]))
    rounds = tuple(draw(st.lists(st.sampled_from(Round), min_size=1, max_size=4)))
    is_eager = set(rounds) == {Round.EAGER}
    is_ordered = num_queues is None and draw(st.booleans())
    calls = []
    for _ in range(draw(st.integers(1, 4))):
        lane = draw(st.integers(0, num_lanes - 1))
        call = Call(
            draw(st.sampled_from(Collective)),
            draw(st.sampled_from([0, 1, 5, 64, 65, 150])),
            lane,
            draw(st.integers(0, num_lanes - 1)) if is_eager and not is_ordered else lane,
            draw(st.booleans()),
            draw(st.booleans()),
            tuple(other for other in range(num_lanes) if other != lane)
            if is_eager and not is_ordered and draw(st.booleans())
            else (),
        )
        calls.append(call)
    orders: list[list[int]] = []
    for _ in range(num_ranks if is_ordered else 0):
        first = draw(st.permutations(range(num_lanes)))
        orders.append(sorted(range(len(calls)), key=lambda number, first=first: first[calls[number].lane]))  # type: ignore[misc]
    return PeerWorld(
        calls,
        num_ranks,
        rounds,
        num_queues,
        buffer_bytes=SLOT_ALIGNMENT * num_ranks * draw(st.integers(1, 4)),
        num_lanes=num_lanes,
        num_user_streams=num_lanes,
        is_replayable=not is_eager or draw(st.booleans()),
        orders=orders,
        is_launched_elsewhere=draw(st.booleans()),
        is_staged=draw(st.booleans()),
        cut_bytes=draw(st.sampled_from([0, 64])),
    )


GATHER, SUM = Call(Collective.ALL_GATHER), Call(Collective.REDUCE_SCATTER)


@pytest.fixture
def two_shots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ONE_SHOT_BYTES", 0)


def find(world: World, *operations: str) -> Verdict:
    """The first fault that names these operations, in orders drawn by seed. Other faults may come of the same cause."""
    verdicts = [sample(world, [seed], is_strict=False) for seed in range(200)]
    found = [verdict for verdict in verdicts if set(verdict.operations) == set(operations)]
    assert found, sorted({str(verdict) for verdict in verdicts})
    return found[0]


# planted faults

PUSH_COPY = "copy bytes 32 to 64 of input {} of rank 0 to buffer 0 of lane 0 of rank 1 on rank 0/compute 0"
ADD = "sum up into bytes 0 to 32 of output 0 of rank 1 on rank 1/compute 0"
PUT_IN = "put bytes 0 to 32 of input {} of rank 0 into buffer 0 of lane 0 of rank 0 on rank 0/compute 0"
PULL_COPY = "copy buffer 0 of lane 0 of rank 0 to bytes 0 to 32 of output 0 of rank 1 on rank 1/compute 0"
PUT_OWN = "put bytes 0 to 32 of input 0 of rank 0 into bytes 0 to 32 of output 0 of rank 0 on rank 0/lane 0, local"


@pytest.mark.parametrize(
    ("calls", "lane", "operations"),
    [
        ([SUM], faults.SignalBeforeData, (PUSH_COPY.format(0), ADD)),
        ([SUM] * 2, faults.OneBuffer, (PUSH_COPY.format(1), ADD)),
        ([GATHER] * 2, faults.OneBuffer, (PUT_IN.format(1), PULL_COPY)),
        ([GATHER], faults.NoWait, (PULL_COPY, PUT_IN.format(0))),
        ([SUM], faults.NoWait, (PUSH_COPY.format(0), ADD)),
        ([GATHER], faults.NoLocalFork, (PUT_OWN, "make input 0 of round 0 on rank 0/compute 0")),
        ([GATHER], faults.NoLocalJoin, (PUT_OWN, "use output 0 of round 0 on rank 0/compute 0")),
    ],
    ids=[
        "signal before data",
        "one buffer, push",
        "one buffer, pull",
        "no wait before a pull",
        "no wait after a push",
        "the own block too early",
        "the own block not waited for",
    ],
)
def test_a_fault_of_a_lane_is_found(calls: list[Call], lane: type[Lane], operations: tuple[str, str]) -> None:
    assert find(PeerWorld(calls, lane=lane), *operations).kind == "race"


@pytest.mark.parametrize("lane", [faults.NoLocalFork, faults.NoLocalJoin, faults.WaitBehindFork])
@pytest.mark.parametrize("name", ["pieces in place", "pieces of a broadcast", "pieces of three ranks"])
def test_a_piece_that_is_put_in_too_early_is_found(name: str, lane: type[Lane]) -> None:
    """Beside the fetches of the one before, and behind all ranks' words for that one."""
    world = replace(LARGER[name], lane=lane)
    assert any(sample(world, [seed], is_strict=False).kind in ("race", "capture") for seed in range(200))


def test_reuse_of_a_signal_is_found() -> None:
    name = "full from rank 0 to rank 1 (lane 0, buffer 0)"
    world = PeerWorld([GATHER] * 2, lane=faults.OneSignal)
    found = find(world, f"set {name} to 1 on rank 0/compute 0")  # both
    assert found.kind == "race"
    assert f"is lost: {name} was set by" in str(found)


def test_a_block_that_is_put_before_the_other_rank_allows_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(Collective.ALL_GATHER, is_shared=True)
    world = PeerWorld([call], rounds=(Round.EAGER,) * 2)
    assert kinds(world) == {"ok"}
    monkeypatch.setattr(steps, "barrier", lambda lane, stream: None)
    put = "copy bytes 0 to 32 of input 0 of rank 0 to output 0 of rank 1 on rank 0/compute 0"
    assert find(world, put, "use output 0 of round 0 on rank 1/compute 0").kind == "race"


def test_a_wait_enqueued_before_this_ranks_own_signal_is_found_where_both_share_a_hardware_queue() -> None:
    def world(num_queues: int | None) -> PeerWorld:
        return PeerWorld([GATHER], num_queues=num_queues, lane=faults.SignalAfterWait)

    assert kinds(world(None)) == {"ok"}
    names = [f"full from rank {k} to rank {1 - k} (lane 0, buffer 0)" for k in (0, 1)]
    waits = [f"wait for {name} on rank {1 - k}/compute 0" for k, name in enumerate(names)]
    sets = [f"set {name} to 1 on rank {k}/lane 0, local" for k, name in enumerate(names)]
    found = find(world(1), *waits, *sets)
    assert found.kind == "deadlock"
    for k in (0, 1):
        what = f"'{waits[k]}' holds queue 0 of rank {1 - k} and waits for '{sets[k]}'"
        assert f"{what}, which is behind '{waits[1 - k]}' in queue 0 of rank {k}" in str(found)


def test_lanes_enqueued_in_another_order_are_a_deadlock_where_they_share_a_hardware_queue() -> None:
    calls = [Call(Collective.ALL_REDUCE, lane=k, stream=k) for k in (0, 1)]

    def world(num_queues: int | None) -> PeerWorld:
        return PeerWorld(calls, num_lanes=2, num_user_streams=2, orders=([0, 1], [1, 0]), num_queues=num_queues)

    assert kinds(world(None)) == {"ok"}
    assert kinds(world(1)) == {"deadlock"}


@pytest.mark.parametrize(
    ("call", "operations"),
    [(SUM, (PUSH_COPY.format(0), ADD)), (GATHER, (PUT_IN.format(0), PULL_COPY))],
    ids=["push", "pull"],
)
def test_a_captured_odd_number_of_exchanges_is_found_when_it_is_replayed(
    call: Call, operations: tuple[str, str]
) -> None:
    replays = (Round.REPLAY, Round.REPLAY)
    assert (
        find(PeerWorld([call], rounds=replays, is_replayable=True, lane=faults.NeverEven), *operations).kind == "race"
    )
    assert kinds(PeerWorld([call], rounds=replays, is_replayable=True)) == {"ok"}


def test_a_captured_local_stream_that_does_not_join_is_found() -> None:
    found = find(PeerWorld([GATHER], rounds=(Round.REPLAY,), is_replayable=True, lane=faults.NoLocalJoin), PUT_OWN)
    assert found.kind == "capture"
    assert "nothing in it waits for" in str(found)


@pytest.mark.parametrize(
    ("rounds", "lane"),
    [((Round.EAGER,), faults.NoOrder), ((Round.EAGER, Round.CAPTURE, Round.EAGER), faults.ForgetsWhenCaptured)],
)
def test_calls_of_a_lane_on_two_streams_without_an_order_are_found(
    rounds: tuple[Round, ...], lane: type[faults.NoOrder]
) -> None:
    calls = [SUM, Call(Collective.REDUCE_SCATTER, stream=1)]
    assert "race" in kinds(PeerWorld(calls, rounds=rounds, num_user_streams=2, is_replayable=True, lane=lane))
    assert kinds(PeerWorld(calls, rounds=rounds, num_user_streams=2, is_replayable=True)) == {"ok"}


def test_a_wait_in_a_capture_for_an_event_from_outside_is_found() -> None:
    driver = FakeDriver(Machine(), "process")
    captured, other = driver.create_stream("captured"), driver.create_stream("other")
    event = driver.create_event()
    driver.record_event(event, other)
    driver.begin_capture(captured)
    with pytest.raises(Fault, match="the event was recorded outside"):
        driver.wait_event(captured, event)


# the real ones


@given(world=peer_worlds(), seeds=orders(num(3, 40)))
def test_pr1_the_real_lanes_have_no_fault(world: PeerWorld, seeds: range) -> None:
    assert_sound(world, seeds, is_strict=False)


SHOTS = pytest.mark.parametrize("shots", [1, 2])


@SHOTS
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_collectives_in_a_row_and_again_from_a_graph(
    num_ranks: int, shots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_in_a_row(num_ranks, shots, 1, monkeypatch)


def check_in_a_row(num_ranks: int, shots: int, num_orders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if shots == 2:
        monkeypatch.setattr(steps, "ONE_SHOT_BYTES", 0)
    calls = [
        Call(each, 65, is_in_place=in_place, is_shared=shared)
        for in_place, shared in ((False, False), (True, False), (False, True), (True, True))
        for each in Collective
    ]
    rounds = (Round.EAGER, Round.REPLAY, Round.REPLAY, Round.EAGER, Round.REPLAY)
    world = PeerWorld(calls, num_ranks, rounds, buffer_bytes=512 // shots * num_ranks, is_replayable=True)
    assert_sound(world, range(num_orders), is_strict=False)


@pytest.mark.parametrize(
    "collective", [Collective.ALL_GATHER, Collective.BROADCAST, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE]
)
def test_a_small_world_has_no_fault_in_any_order(collective: Collective, two_shots: None) -> None:
    assert_sound_in_all_orders(PeerWorld([Call(collective)]), is_strict=False)


SUMS = Collective.ALL_REDUCE, Collective.REDUCE_SCATTER

LARGER = {
    "three calls": PeerWorld([GATHER, SUM, Call(Collective.ALL_REDUCE)]),
    "pieces": PeerWorld([Call(Collective.ALL_TO_ALL, 150)], buffer_bytes=512),
    "pieces in place": PeerWorld([Call(Collective.ALL_GATHER, 450, is_in_place=True)], buffer_bytes=512),
    "pieces of a broadcast": PeerWorld(
        [Call(Collective.BROADCAST, 800)], 3, (Round.REPLAY,) * 2, buffer_bytes=768, is_replayable=True
    ),
    "pieces of three ranks": PeerWorld(
        [Call(Collective.ALL_TO_ALL, 300, lane=k, stream=k) for k in (0, 1)],
        num_ranks=3,
        num_queues=1,
        buffer_bytes=768,
        num_lanes=2,
        num_user_streams=2,
    ),
    "three ranks": PeerWorld([Call(Collective.ALL_REDUCE, is_in_place=True)], num_ranks=3),
    "two lanes": PeerWorld(
        [Call(Collective.ALL_GATHER, lane=k, stream=k) for k in (0, 1)], num_lanes=2, num_user_streams=2
    ),
    "sums in pieces on two lanes each": PeerWorld(
        [Call(each, 256, k, k, more_lanes=(k + 2,)) for k, each in enumerate(SUMS)],
        num_queues=1,
        buffer_bytes=1024,
        num_lanes=4,
        num_user_streams=2,
        rounds=(Round.EAGER, Round.REPLAY, Round.REPLAY),
        is_replayable=True,
        is_staged=True,
        cut_bytes=64,
    ),
    "put": PeerWorld([Call(Collective.ALL_TO_ALL, is_shared=True)] * 2),
    "replays": PeerWorld([GATHER], rounds=(Round.REPLAY,) * 3, is_replayable=True),
}


@pytest.mark.parametrize("name", LARGER)
def test_a_larger_world_has_no_fault_in_many_orders(name: str, two_shots: None) -> None:
    assert_sound_in_all_orders(LARGER[name], most_runs=500, is_strict=False)
