"""The replay by itself: rates, meetings, waits, circles."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfade.profile.doctor.build import build
from crossfade.profile.doctor.changes import beside_their_callers, without_order
from crossfade.profile.doctor.program import NOBODY, HostCall, Program, Wait, Work
from crossfade.profile.doctor.replay import WaitsForItself, replay
from crossfade.profile.doctor.turns import in_turns
from crossfade.profile.traces.events import ActivityKind
from crossfade.profile.traces.reader import read_traces
from tests.helpers.gpu_traces import Machine, Rank

COMPUTE, COMMUNICATION, COPY = ActivityKind.COMPUTE, ActivityKind.COMMUNICATION, ActivityKind.COPY


def work(
    kind: ActivityKind,
    amount_us: float,
    lane: int,
    *,
    rank: int = 0,
    start_us: float = 0.0,
    after: tuple[Wait, ...] = (),
    demand: float = 1.0,
    rate: float = 1.0,
    meeting: int = NOBODY,
) -> Work:
    demand = demand if kind is COMPUTE else 0.0
    return Work(kind, rank, lane, NOBODY, start_us, 0.0, after, amount_us, demand, rate, meeting, 0)


def ends(*works: Work, num_ranks: int = 1, calls: tuple[HostCall, ...] = ()) -> tuple[float, ...]:
    return replay(Program(calls, works, num_ranks, 1)).ends_us


def test_work_of_a_lane_is_in_order() -> None:
    assert ends(work(COMPUTE, 10, 0), work(COMPUTE, 5, 0)) == (10, 15)


def test_kernels_share_the_multiprocessors() -> None:
    assert ends(work(COMPUTE, 10, 0), work(COMPUTE, 10, 1)) == (20, 20)
    assert ends(work(COMPUTE, 10, 0, demand=0.5), work(COMPUTE, 10, 1, demand=0.5)) == (10, 10)


def test_computation_beside_a_collective_is_slowed_down_for_as_long_as_it_lasts() -> None:
    found = ends(work(COMPUTE, 10, 0, rate=0.5), work(COMMUNICATION, 4, 1, rate=0.8))
    assert found == pytest.approx((12.5, 5.0))


def test_copies_slow_nobody_down() -> None:
    assert ends(work(COMPUTE, 10, 0, rate=0.5), work(COPY, 4, 1)) == (10, 4)


def test_a_collective_moves_once_its_last_rank_has_started() -> None:
    found = ends(
        work(COMMUNICATION, 4, 0, rank=0, meeting=0),
        work(COMMUNICATION, 4, 1, rank=1, start_us=30, meeting=0),
        num_ranks=2,
    )
    assert found == (34, 34)


def test_it_slows_computation_down_while_it_waits_for_its_peers() -> None:
    found = ends(
        work(COMMUNICATION, 4, 0, rank=0, meeting=0),
        work(COMMUNICATION, 4, 1, rank=1, start_us=100, meeting=0),
        work(COMPUTE, 10, 2, rank=0, rate=0.5),
        num_ranks=2,
    )
    assert found[2] == 20


def test_collectives_of_one_rank_share_the_links() -> None:
    assert ends(work(COMMUNICATION, 4, 0), work(COMMUNICATION, 4, 1)) == (8, 8)


def test_the_host_waits_and_goes_on() -> None:
    calls = (
        HostCall(0, NOBODY, 1.0, 2.0, (), 0),
        HostCall(0, 0, 1.0, 2.0, (Wait(0, 5.0),), 0),
        HostCall(0, 1, 1.0, 2.0, (), 0),
    )
    works = (
        work(COMPUTE, 50, 0)._replace(call=0, launch_lag_us=7.0),
        work(COMPUTE, 50, 0)._replace(call=2, launch_lag_us=7.0),
    )
    assert ends(*works, calls=calls) == (58, 58 + 5 + 1 + 7 + 50)


def test_a_circle_is_an_error() -> None:
    with pytest.raises(WaitsForItself, match="in a circle"):
        ends(work(COMPUTE, 1, 0, after=(Wait(1, 0.0),)), work(COMPUTE, 1, 1, after=(Wait(0, 0.0),)))


def test_only_another_communicator_ends_the_order_of_collectives() -> None:
    first, second = work(COMMUNICATION, 100, 0), work(COMMUNICATION, 100, 1, after=(Wait(0, 0.0, is_order=True),))
    program = Program((), (first, second, work(COMPUTE, 50, 0)), 1, 1)
    assert replay(beside_their_callers(program, [0], lambda _: NOBODY)).starts_us == (0, 100, 0)
    for moved in (0, 1):
        assert replay(without_order(program, [moved])).starts_us[1] == 0


def test_batches_in_turns_end_sooner(tmp_path: Path) -> None:
    """Each batch's collectives are beside the other's computation, where the host launches slowly."""

    def program(rank: Rank) -> None:
        for place, stream in enumerate((7, 13)):
            rank.stream = stream
            for _ in range(10):
                rank.python(150)
                rank.kernel(120, f"gemm {place}", 132)
                rank.all_reduce(180, 1 << 22, group=str(place))()
        rank.wait_stream(7)
        rank.kernel(20, "joined")

    traced = build(read_traces(Machine(program).save(tmp_path)))
    lanes = {work.lane for work in traced.program.works if work.kind is COMPUTE}
    before, after = replay(traced.program).end_us, replay(in_turns(traced.program, lanes)).end_us
    assert after < 0.97 * before
