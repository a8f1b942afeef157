"""A -> B -> C, and A dies: rubbish travels from device to device, and no host publishes it (docs/decisions/0011, "A dead peer").

Each world is followed through every order of steps that the fake machine can tell apart.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from crossfade.testing.fake import Machine, Verdict, explore, sample
from tests.helpers.death_worlds import ChainWorld, Look
from tests.helpers.peer_deaths import LooseMachine


@pytest.fixture(autouse=True)
def _no_search_for_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "touch", LooseMachine.touch)
    monkeypatch.setattr(Machine, "store", LooseMachine.store)


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
        verdict = sample(world, range(1_000))
    assert verdict.is_ok, verdict


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
