"""The fake machine finds no fault in sums in turns, whatever is drawn: ranks, lanes, rounds and their lengths, lag,
outputs of the caller or shared, other operators and collectives in between, captures, and
replays beside ranks that do not replay; and it finds the faults that were planted, by the operations that do not go together.

PL-5 is asked for by its meaning, as for collectives: no deadlock in any order, on any number of hardware queues.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.ops.algorithms import schedule
from crossfade.ops.calls.products import in_order, place, shares
from crossfade.peers.lane import Lane
from crossfade.testing.fake import sample
from tests.helpers.worlds.kit import assert_sound, assert_sound_in_all_orders, orders
from tests.helpers.worlds.lane_faults import (
    FetchElsewhere,
    NeverCleared,
    NeverEven,
    NoLocalFork,
    NoLocalJoin,
    NoStepWait,
    NoWait,
    OneBuffer,
    OneSignal,
    StepBeforeCopy,
    StepBehind,
    StepsByTheStream,
    SumsBeforeAdd,
)
from tests.helpers.worlds.ranks import Call, Collective, Round
from tests.helpers.worlds.turns import SUMS, TurnsWorld, Way, turns_worlds

SCATTER, REDUCE = SUMS


@given(world=turns_worlds(), seeds=orders(3))
def test_pr1_pr2_sums_in_turns_have_no_fault(world: TurnsWorld, seeds: range) -> None:
    assert_sound(world, seeds, is_strict=False)


@pytest.mark.parametrize("num_queues", [None, 1])
@pytest.mark.parametrize(("num_parts", "lag", "taper"), [(1, 0, 1), (2, 0, 3), (3, 1, 1), (4, 3, 2)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ways_in_a_row_and_again_from_a_graph(
    num_ranks: int, num_parts: int, lag: int, taper: int, num_queues: int | None
) -> None:
    """One rank of two replays the graph, and the other one does the same calls one by one."""
    ways = [Way.TURNS, Way.TURNS, Way.ROUNDS, Way.TURNS, Way.TURNS, Way.COLLECTIVE, Way.TURNS, Way.TURNS]
    exchange, gather = Collective.ALL_TO_ALL, Collective.ALL_GATHER
    operators = [SCATTER, REDUCE, exchange, REDUCE, REDUCE, gather, SCATTER, SCATTER]
    calls = [Call(each, 61, is_shared=number == 3) for number, each in enumerate(operators)]
    rounds = (Round.EAGER, Round.REPLAY, Round.REPLAY)
    shape: dict[str, Any] = {"num_parts": num_parts, "lag": lag, "taper": taper}
    options = {"buffer_bytes": 256 * num_ranks, "is_replayable": True, "is_half_replayed": True, **shape}
    assert_sound(TurnsWorld(calls, num_ranks, rounds, num_queues, ways=ways, **options), range(2), is_strict=False)


@pytest.mark.parametrize(("num_parts", "lag"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("operator", SUMS)
def test_a_small_world_has_no_fault_in_many_orders(
    operator: Collective, is_shared: bool, num_parts: int, lag: int
) -> None:
    calls = [Call(operator, 6, is_shared=is_shared)] * 2
    world = TurnsWorld(calls, num_parts=num_parts, lag=lag, buffer_bytes=512)
    assert_sound_in_all_orders(world, most_runs=40, is_strict=False)


# Faults


def verbs(operations: tuple[str, ...]) -> frozenset[str]:
    return frozenset(operation.split()[0] for operation in operations)


def found(
    operator: Collective, fault: type[Lane] = Lane, *, is_shared: bool = False, **options: Any
) -> set[tuple[str, frozenset[str]]]:
    """What is found in orders drawn by seed: the kind, and the first words of the operations that do not go together."""
    shape = {"rounds": (Round.EAGER,) * 3, "num_parts": 3, "buffer_bytes": 768, **options}
    world = TurnsWorld([Call(operator, 12, is_shared=is_shared)], 3, lane=fault, **shape)
    verdicts = [sample(world, [seed], is_strict=False) for seed in range(6)]
    return {(each.kind, verbs(each.operations)) for each in verdicts}


REPLAYED: dict[str, Any] = {"rounds": (Round.REPLAY,) * 3, "is_replayable": True}


def race(*names: str) -> tuple[str, frozenset[str]]:
    return "race", frozenset(names)


NONE = {("ok", frozenset[str]())}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("operator", SUMS)
def test_without_a_fault_nothing_is_found(operator: Collective, is_shared: bool) -> None:
    assert found(operator, is_shared=is_shared) == NONE
    for num_parts in (1, 2, 3):
        assert found(operator, is_shared=is_shared, num_parts=num_parts, **REPLAYED) == NONE


EACH: list[tuple[Collective, bool]] = [(SCATTER, False), (REDUCE, False), (REDUCE, True)]
"""An operator, and whether its output is shared."""

FAULTS: list[tuple[str, type[Lane], list[tuple[Collective, bool]], tuple[str, ...], dict[str, Any]]] = [
    ("a step is set in front of its copies", StepBeforeCopy, EACH[:2], ("sum", "copy"), {}),
    ("steps are never put back", NeverCleared, EACH, ("sum", "copy"), {}),
    ("steps are not waited for", NoStepWait, EACH, ("sum", "copy"), {}),
    ("a step is waited for one too early", StepBehind, EACH, ("sum", "copy"), {}),
    ("a step is set by a stream that has not copied", StepsByTheStream, EACH, ("sum", "copy"), {}),
    ("sums are announced in front of the kernel that adds", SumsBeforeAdd, EACH[1:2], ("sum", "copy"), {}),
    ("sums are fetched by a stream that did not wait for them", FetchElsewhere, EACH[1:2], ("sum", "copy"), {}),
    ("a shared output is used before the others have written it", NoWait, EACH[2:], ("use", "copy"), {}),
    # With one round: later rounds of the same call come behind signals that happen to say enough.
    ("all exchanges have one buffer", OneBuffer, EACH[:1], ("sum", "copy"), {"num_parts": 1}),
    ("all exchanges have one buffer", OneBuffer, EACH[1:2], ("copy",), {"num_parts": 1}),
    ("parts are sent before they are computed", NoLocalFork, EACH[:2], ("put", "copy"), {}),
    ("a call ends before its local stream", NoLocalJoin, EACH[1:], ("use", "copy"), {}),
]


@pytest.mark.parametrize(
    ("fault", "operator", "is_shared", "names", "options"),
    [
        pytest.param(fault, *way, names, options, id=f"{what}, {way[0]}{', shared' * way[1]}")
        for what, fault, ways, names, options in FAULTS
        for way in ways
    ],
)
def test_a_fault_is_found(
    fault: type[Lane], operator: Collective, is_shared: bool, names: tuple[str, ...], options: dict[str, Any]
) -> None:
    assert race(*names) in found(operator, fault, is_shared=is_shared, **options)


def test_a_replayable_lane_without_the_empty_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "barrier", lambda lane, stream: None)
    options: dict[str, Any] = {"rounds": (Round.REPLAY,) * 3, "is_replayable": True}
    assert found(SCATTER, **options) == NONE  # then the lane ends the call with one
    kinds = found(SCATTER, NeverEven, **options)
    assert kinds & {race("set", "reset"), race("copy", "sum"), race("set")}
    assert kinds.isdisjoint(NONE)


@pytest.mark.parametrize("operator", SUMS)
def test_one_signal_for_all_exchanges_is_found(operator: Collective) -> None:
    assert found(operator, OneSignal) & {race("set", "reset"), race("set")}


OTHERS, OWN = False, True


def test_turns_in_words() -> None:
    assert in_order(1, 0) == [(0, OTHERS), (0, OWN)]
    assert in_order(3, 0) == [(0, OTHERS), (0, OWN), (1, OTHERS), (1, OWN), (2, OTHERS), (2, OWN)]
    assert in_order(3, 1) == [(0, OTHERS), (1, OTHERS), (0, OWN), (2, OTHERS), (1, OWN), (2, OWN)]
    assert in_order(3, 2) == [(0, OTHERS), (1, OTHERS), (2, OTHERS), (0, OWN), (1, OWN), (2, OWN)]
    assert in_order(3, 2) == in_order(3, 9)


@given(st.integers(1, 12), st.integers(0, 14))
def test_each_turn_comes_once_and_behind_what_it_needs(num_rounds: int, lag: int) -> None:
    found = in_order(num_rounds, lag)
    assert sorted(found) == [(number, is_own) for number in range(num_rounds) for is_own in (OTHERS, OWN)]
    for kind in (OTHERS, OWN):  # steps are announced, and waited for, one after the other
        assert [number for number, is_own in found if is_own is kind] == list(range(num_rounds))
    for number in range(num_rounds):
        behind = [each for each, is_own in found[: found.index((number, OWN))] if is_own is OTHERS]
        assert len(behind) == min(number + lag, num_rounds - 1) + 1  # its own round's, and so many more


def test_shares_fall_from_round_to_round() -> None:
    assert shares(1, 3) == [1]
    assert shares(3, 1) == [1, 1, 1]
    assert shares(3, 2) == [4, 2, 1]
    assert shares(2, 3) == [3, 1]


@pytest.mark.parametrize(
    ("length", "part", "whole", "at"),
    [(0, 1, 2, 0), (10, 1, 3, 3), (10, 3, 3, 10), (2048, 3, 4, 1536), (2048, 1, 3, 640), (511, 1, 2, 255)],
)
def test_rounds_begin_between_tiles_where_they_are_long_enough(length: int, part: int, whole: int, at: int) -> None:
    assert place(length, part, whole) == at


@given(st.integers(0, 20_000), st.integers(1, 8), st.integers(1, 4))
def test_the_rounds_of_a_block_are_all_of_it(length: int, num_rounds: int, taper: int) -> None:
    ends = [0, *accumulate(shares(num_rounds, taper))]
    rows = [place(length, each, ends[-1]) for each in ends]
    assert (rows[0], rows[-1]) == (0, length)
    lengths = [end - begin for begin, end in pairwise(rows)]
    assert min(lengths) >= 0
    if length >= 256 * ends[-1]:
        assert min(lengths) > 0
        assert all(row % 128 == 0 for row in rows[:-1])
