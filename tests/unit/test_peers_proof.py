"""The fake machine finds the faults that lanes and exchanges can have, each by name with its two operations, and none in the real
ones, whatever is drawn: ranks, lanes, tunings, lengths, hardware queues, captures and replays, and the order of all steps.

Waits for other ranks may be enqueued before what they wait for (that is another host's business), so PL-5 is asked for by its
meaning: no deadlock in any order, on any number of hardware queues.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.peers import steps
from crossfade.peers.lane import SLOT_ALIGNMENT, Lane
from crossfade.peers.tuning import DEFAULT, Direction, Tuning
from crossfade.testing.fake import FakeDriver, Fault, Machine, Verdict, sample
from crossfade.testing.fake.explore import World
from tests.helpers.counts import num
from tests.helpers.worlds import lane_faults as faults
from tests.helpers.worlds.kit import assert_sound, assert_sound_in_all_orders, kinds, orders
from tests.helpers.worlds.ranks import Call, Collective, PeerWorld, Round

NUM_STREAMS = 3


@st.composite
def tunings(draw: st.DrawFn, num_ranks: int) -> tuple[Tuning, ...]:
    """One for each rank; what the ranks have to agree on is the same."""
    direction = draw(st.sampled_from(Direction))
    one_shot_bytes = draw(st.sampled_from([0, 128, 1 << 18]))
    each = st.builds(
        Tuning,
        direction=st.just(direction),
        num_streams=st.integers(1, NUM_STREAMS),
        chunk_bytes=st.sampled_from([None, 64, 144]),
        is_staggered=st.booleans(),
        is_interleaved=st.booleans(),
        is_batched=st.booleans(),
        one_shot_bytes=st.just(one_shot_bytes),
    )
    return tuple(draw(st.lists(each, min_size=num_ranks, max_size=num_ranks)))


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
            draw(tunings(num_ranks)),
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
        buffer_bytes=SLOT_ALIGNMENT * num_ranks * draw(st.integers(1, 2)),
        num_lanes=num_lanes,
        num_streams=NUM_STREAMS,
        num_user_streams=num_lanes,
        is_replayable=not is_eager or draw(st.booleans()),
        orders=orders,
        is_launched_elsewhere=draw(st.booleans()),
    )


PUSH = Tuning(direction=Direction.PUSH)
GATHER_PUSH = Call(Collective.ALL_GATHER, tunings=(PUSH,))
GATHER_PULL = Call(Collective.ALL_GATHER)
SUM_IN_PLACE = Call(Collective.ALL_REDUCE, tunings=(Tuning(num_streams=2),), is_in_place=True)


def find(world: World, *operations: str) -> Verdict:
    """The first fault that names these operations, in orders drawn by seed. Other faults may come of the same cause."""
    verdicts = [sample(world, [seed], is_strict=False) for seed in range(200)]
    found = [verdict for verdict in verdicts if set(verdict.operations) == set(operations)]
    assert found, sorted({str(verdict) for verdict in verdicts})
    return found[0]


# planted faults

PUSH_COPY = "copy bytes 0 to 32 of input {} of rank 0 to buffer 0 of lane 0 of rank 1 on rank 0/compute 0"
TAKE_OUT = "put buffer 0 of lane 0 of rank 1 into bytes 0 to 32 of output 0 of rank 1 on rank 1/compute 0"
PUT_IN = "put bytes 0 to 32 of input {} of rank 0 into buffer 0 of lane 0 of rank 0 on rank 0/compute 0"
PULL_COPY = "copy buffer 0 of lane 0 of rank 0 to bytes 0 to 32 of output 0 of rank 1 on rank 1/compute 0"


@pytest.mark.parametrize(
    ("calls", "lane", "operations"),
    [
        ([GATHER_PUSH], faults.SignalBeforeData, (PUSH_COPY.format(0), TAKE_OUT)),
        ([GATHER_PUSH] * 2, faults.OneBuffer, (PUSH_COPY.format(1), TAKE_OUT)),
        ([GATHER_PULL] * 2, faults.OneBuffer, (PUT_IN.format(1), PULL_COPY)),
        ([GATHER_PULL], faults.NoWait, (PULL_COPY, PUT_IN.format(0))),
        ([GATHER_PUSH], faults.NoWait, (PUSH_COPY.format(0), TAKE_OUT)),
    ],
    ids=["signal before data", "one buffer, push", "one buffer, pull", "no wait before a pull", "no wait after a push"],
)
def test_a_fault_of_a_lane_is_found(calls: list[Call], lane: type[Lane], operations: tuple[str, str]) -> None:
    assert find(PeerWorld(calls, lane=lane), *operations).kind == "race"


def test_reuse_of_a_signal_is_found() -> None:
    name = "full from rank 0 to rank 1 (lane 0, buffer 0)"
    world = PeerWorld([GATHER_PULL] * 2, lane=faults.OneSignal)
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
    call = Call(Collective.ALL_GATHER, tunings=(Tuning(num_streams=2, is_batched=False),))

    def world(num_queues: int | None) -> PeerWorld:
        return PeerWorld([call], num_queues=num_queues, num_streams=2, lane=faults.SignalAfterWait)

    assert kinds(world(None)) == {"ok"}
    names = [f"full from rank {k} to rank {1 - k} (lane 0, buffer 0)" for k in (0, 1)]
    waits = [f"wait for {name} on rank {1 - k}/compute 0" for k, name in enumerate(names)]
    sets = [f"set {name} to 1 on rank {k}/lane 0, 1" for k, name in enumerate(names)]
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
    [(GATHER_PUSH, (PUSH_COPY.format(0), TAKE_OUT)), (GATHER_PULL, (PUT_IN.format(0), PULL_COPY))],
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


def test_a_sum_before_the_side_streams_have_joined_is_found() -> None:
    world = PeerWorld([SUM_IN_PLACE], num_ranks=3, num_streams=2, lane=faults.NoJoin)
    total = "sum up into bytes 0 to 32 of output 0 of rank 0 on rank 0/compute 0"
    copy = "copy bytes 0 to 32 of output 0 of rank 0 to buffer 0 of lane 0 of rank 2 on rank 0/lane 0, 1"
    assert find(world, total, copy).kind == "race"


def test_a_captured_side_stream_that_does_not_join_is_found() -> None:
    rounds = (Round.REPLAY,)
    world = PeerWorld([SUM_IN_PLACE], 3, rounds, num_streams=2, is_replayable=True, lane=faults.NoJoin)
    found = find(world, "set full from rank 0 to rank 2 (lane 0, buffer 0) to 1 on rank 0/lane 0, 1")
    assert found.kind == "capture"
    assert "nothing in it waits for" in str(found)


def test_a_side_stream_that_begins_too_early_is_found() -> None:
    call = Call(Collective.ALL_GATHER, tunings=(Tuning(direction=Direction.PUSH, num_streams=2),))
    world = PeerWorld([call], num_ranks=3, num_streams=2, lane=faults.NoFork)
    make = "make input 0 of round 0 on rank 0/compute 0"
    copy = "copy bytes 0 to 32 of input 0 of rank 0 to buffer 0 of lane 0 of rank 2 on rank 0/lane 0, 1"
    assert find(world, make, copy).kind == "race"


@pytest.mark.parametrize(
    ("rounds", "lane"),
    [((Round.EAGER,), faults.NoOrder), ((Round.EAGER, Round.CAPTURE, Round.EAGER), faults.ForgetsWhenCaptured)],
)
def test_calls_of_a_lane_on_two_streams_without_an_order_are_found(
    rounds: tuple[Round, ...], lane: type[faults.NoOrder]
) -> None:
    calls = [GATHER_PUSH, Call(Collective.ALL_GATHER, stream=1, tunings=(PUSH,))]
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


TUNINGS = {
    "plain": DEFAULT,
    "one by one": Tuning(is_batched=False, is_staggered=False),
    "two streams": Tuning(num_streams=2, is_batched=False),
    "three streams": Tuning(num_streams=3, is_interleaved=True, chunk_bytes=64),
    "push": PUSH,
    "push, one by one": Tuning(direction=Direction.PUSH, is_batched=False),
    "push, two streams": Tuning(direction=Direction.PUSH, num_streams=2, is_interleaved=True, chunk_bytes=64),
    "two shots": Tuning(one_shot_bytes=0),
    "two shots, two streams": Tuning(one_shot_bytes=0, num_streams=2),
}


@pytest.mark.parametrize(
    ("num_ranks", "tuning"), [*((3, tuning) for tuning in TUNINGS), (2, "plain"), (4, "three streams")]
)
def test_all_collectives_in_a_row_and_again_from_a_graph(num_ranks: int, tuning: str) -> None:
    check_in_a_row(num_ranks, tuning, 1)


def check_in_a_row(num_ranks: int, tuning: str, num_orders: int) -> None:
    calls = [
        Call(each, 65, tunings=(TUNINGS[tuning],), is_in_place=in_place, is_shared=shared)
        for in_place, shared in ((False, False), (True, False), (False, True), (True, True))
        for each in Collective
    ]
    rounds = (Round.EAGER, Round.REPLAY, Round.REPLAY, Round.EAGER, Round.REPLAY)
    world = PeerWorld(calls, num_ranks, rounds, buffer_bytes=256 * num_ranks, num_streams=3, is_replayable=True)
    assert_sound(world, range(num_orders), is_strict=False)


@pytest.mark.parametrize(
    ("collective", "tuning"),
    [
        (Collective.ALL_GATHER, "plain"),
        (Collective.BROADCAST, "plain"),
        (Collective.REDUCE_SCATTER, "plain"),
        (Collective.ALL_REDUCE, "two shots"),
    ],
)
def test_a_small_world_has_no_fault_in_any_order(collective: Collective, tuning: str) -> None:
    call = Call(collective, tunings=(TUNINGS[tuning],))
    assert_sound_in_all_orders(PeerWorld([call]), is_strict=False)


LARGER = {
    "three calls": PeerWorld([GATHER_PULL, GATHER_PUSH, Call(Collective.ALL_REDUCE, tunings=(TUNINGS["two shots"],))]),
    "pieces": PeerWorld([Call(Collective.ALL_TO_ALL, 150)], buffer_bytes=512),
    "pieces of a broadcast": PeerWorld([Call(Collective.BROADCAST, 300)], num_ranks=3, buffer_bytes=768),
    "three ranks": PeerWorld([SUM_IN_PLACE], num_ranks=3),
    "two lanes": PeerWorld(
        [Call(Collective.ALL_GATHER, lane=k, stream=k) for k in (0, 1)], num_lanes=2, num_user_streams=2
    ),
    "put": PeerWorld([Call(Collective.ALL_TO_ALL, is_shared=True)] * 2),
    "replays": PeerWorld([GATHER_PULL], rounds=(Round.REPLAY,) * 3, is_replayable=True),
}


@pytest.mark.parametrize("name", LARGER)
def test_a_larger_world_has_no_fault_in_many_orders(name: str) -> None:
    world = LARGER[name]
    world.num_streams = 2
    assert_sound_in_all_orders(world, most_runs=500, is_strict=False)
