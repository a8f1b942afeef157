"""The fake machine finds no fault in operators by copy engines, whatever is drawn: ranks, lanes, rounds, lengths, hardware queues,
captures and replays, and the order of all steps; and it finds the faults that were planted, by name.

PL-5 is asked for by its meaning, as for collectives: no deadlock in any order, on any number of hardware queues.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given

from crossfade.ops.algorithms import overlaps
from crossfade.peers.lane import Lane
from tests.helpers.counts import num
from tests.helpers.worlds.kit import assert_sound, assert_sound_in_all_orders, kinds, orders
from tests.helpers.worlds.lane_faults import EarlySignal, NoLocalFork, NoLocalJoin, NoWaitAtAll, OneBuffer, OneSignal
from tests.helpers.worlds.operators import OPERATORS, OpsWorld, ops_worlds
from tests.helpers.worlds.ranks import Call, Collective, Round


@given(world=ops_worlds(), seeds=orders(num(3, 20)))
def test_pr1_pr2_operators_have_no_fault(world: OpsWorld, seeds: range) -> None:
    assert_sound(world, seeds, is_strict=False)


@pytest.mark.parametrize("num_queues", [None, 1, 2])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_operators_in_a_row_and_again_from_a_graph(num_ranks: int, num_parts: int, num_queues: int | None) -> None:
    calls = [Call(each, 61) for each in OPERATORS]
    calls += [Call(each, 61, is_shared=True) for each in (Collective.ALL_REDUCE, Collective.ALL_GATHER)]
    rounds = (Round.EAGER, Round.REPLAY, Round.REPLAY)
    options = {"buffer_bytes": 256 * num_ranks, "is_replayable": True, "num_parts": num_parts}
    assert_sound(OpsWorld(calls, num_ranks, rounds, num_queues, **options), range(2), is_strict=False)  # type: ignore[arg-type]


IN_FRONT_OR_BEHIND = pytest.mark.parametrize(
    ("operator", "is_turned"), [*product(OPERATORS, [False]), (Collective.ALL_TO_ALL, True)]
)
"""An all-to-all stands behind its products, or in front of them."""


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@IN_FRONT_OR_BEHIND
def test_a_small_world_has_no_fault_in_many_orders(operator: Collective, is_turned: bool, num_parts: int) -> None:
    world = OpsWorld([Call(operator, 6)] * 2, num_parts=num_parts, buffer_bytes=512, is_turned=is_turned)
    assert_sound_in_all_orders(world, most_runs=100, is_strict=False)


@pytest.mark.parametrize("rounds", [(Round.EAGER,), (Round.REPLAY,)])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@IN_FRONT_OR_BEHIND
def test_an_odd_number_of_exchanges_has_no_fault_in_many_orders(
    operator: Collective, is_turned: bool, num_parts: int, rounds: tuple[Round, ...]
) -> None:
    options = {"buffer_bytes": 512, "is_replayable": True, "num_parts": num_parts, "is_turned": is_turned}
    assert_sound_in_all_orders(OpsWorld([Call(operator, 20)], 2, rounds, **options), most_runs=40, is_strict=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [EarlySignal, NoLocalFork, NoWaitAtAll, OneBuffer, OneSignal])
@IN_FRONT_OR_BEHIND
def test_a_faulty_lane_is_found(operator: Collective, is_turned: bool, fault: type[Lane]) -> None:
    options = {"num_parts": 3, "buffer_bytes": 768, "lane": fault, "is_turned": is_turned}
    world = OpsWorld([Call(operator, 12)], 3, (Round.EAGER,) * 2, **options)  # type: ignore[arg-type]
    assert kinds(world) & {"race", "deadlock"}


@pytest.mark.parametrize("operator", [each for each in OPERATORS if each is not Collective.ALL_GATHER])
def test_a_call_that_ends_before_its_local_stream_is_found(operator: Collective) -> None:
    world = OpsWorld([Call(operator, 12)], rounds=(Round.EAGER,) * 2, buffer_bytes=512, lane=NoLocalJoin)
    assert "race" in kinds(world)


def test_rows_that_are_put_before_the_other_rank_allows_it_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rounds = [Call(Collective.ALL_GATHER, 12, is_shared=True)], (Round.EAGER,) * 2
    assert kinds(OpsWorld(calls, rounds=rounds)) == {"ok"}
    monkeypatch.setattr(overlaps, "barrier", lambda lane, stream: None)
    assert "race" in kinds(OpsWorld(calls, rounds=rounds), 40)


def test_an_all_to_all_whose_next_round_does_not_wait_for_the_fetches_is_found() -> None:
    def world(never_waits: bool) -> OpsWorld:
        call = Call(Collective.ALL_TO_ALL, 12)
        return OpsWorld([call], num_ranks=3, num_parts=4, buffer_bytes=768, never_waits=never_waits)

    assert kinds(world(False)) == {"ok"}
    assert "race" in kinds(world(True), 40)
