"""A -> B -> C, and A dies: rubbish travels from device to device, and no host publishes it (docs/decisions/0011, "A dead peer").

Each world is followed through every order of steps that the fake machine can tell apart.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from crossfade.peers import steps
from crossfade.testing.fake import Fault, Verdict, explore, sample
from tests.helpers.worlds.deaths import ChainWorld, DeathWorld, Look, drive
from tests.helpers.worlds.kit import assert_sound, no_search_for_races
from tests.helpers.worlds.ranks import Call, Collective

pytestmark = pytest.mark.usefixtures("no_search_for_races")

__all__ = ["no_search_for_races"]


def followed(world: ChainWorld) -> Verdict:
    with closing(world):
        return explore(world, most_runs=100_000)


@pytest.mark.parametrize("look", [Look.NONE, Look.FLAG, Look.EARLY])
def test_without_the_check_a_host_publishes_rubbish(look: Look) -> None:
    """Also one that looks whether it was told, and one that asks too early."""
    assert str(followed(ChainWorld(look))).startswith("wrong value: C publishes rubbish")


def test_with_the_check_no_host_does_in_any_order() -> None:
    world = ChainWorld(Look.CHECK)
    verdict = followed(world)
    assert verdict.is_ok, verdict
    assert verdict.is_complete
    assert world.num_published > 0  # in the orders in which the value came before the death


@pytest.mark.parametrize("num_slots", [1, 2])
def test_with_the_check_no_host_does_when_values_follow_each_other(num_slots: int) -> None:
    with closing(ChainWorld(Look.CHECK, num_values=4, num_slots=num_slots)) as world:
        assert_sound(world, range(1_000))


def test_the_same_values_are_rubbish_without_the_check() -> None:
    with closing(ChainWorld(Look.NONE, num_values=4, num_slots=2)) as world:
        assert sample(world, range(1_000)).kind == "wrong value"


def test_who_lets_its_own_streams_go_breaks_its_ends_off_first() -> None:
    """Then it needs no check for what it lets go itself; the other way round it publishes rubbish."""
    first = followed(ChainWorld(is_relay_publishing=True))
    assert first.is_ok, first
    assert first.is_complete
    later = followed(ChainWorld(is_relay_publishing=True, is_marked_first=False))
    assert str(later).startswith("wrong value: B publishes rubbish")


# a rank in the middle of an all-reduce

CALL = Call(Collective.ALL_REDUCE)
MOMENTS = range(22)


@pytest.fixture(autouse=True)
def two_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ONE_SHOT_BYTES", 0)


def outcomes(*, is_asking: bool) -> list[Fault | None]:
    return [drive(DeathWorld(CALL, num_left, is_asking=is_asking)) for num_left in MOMENTS]


def test_nobody_takes_rubbish_for_a_result() -> None:
    """Rank 0 hears of the death first, its streams are released, and they give rank 1 a sum in which a block is missing. Rank 1 has
    all the signals that it waits for. So its own watchdog is not enough: its check has to ask the system who is alive.
    """
    found = [fault for fault in outcomes(is_asking=False) if fault is not None]
    assert {str(fault) for fault in found} == {"wrong value: rank 1 takes rubbish for a result"}
    assert outcomes(is_asking=True) == [None] * len(MOMENTS)
