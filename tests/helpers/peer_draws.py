"""Worlds of ranks with lanes, as hypothesis draws them."""

from __future__ import annotations

from hypothesis import strategies as st

from crossfade.peers.lane import SLOT_ALIGNMENT
from crossfade.peers.tuning import Direction, Tuning
from tests.helpers.peer_worlds import Call, Collective, PeerWorld, Round

__all__ = ["peer_worlds"]

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
