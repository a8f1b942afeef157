"""The ranks with lanes of ``make test``, twenty times as many, in ten times as many orders; small worlds in more orders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.peers.tuning import Direction, Tuning
from crossfade.testing.fake import explore, sample
from tests.helpers.peer_draws import peer_worlds
from tests.helpers.peer_worlds import Call, Collective, PeerWorld
from tests.unit.test_peers_proof import TUNINGS, check_in_a_row


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=2_000)
@given(world=peer_worlds(), first=st.integers(0, 1 << 32))
def test_pr1_two_thousand_random_worlds_have_no_fault(world: PeerWorld, first: int) -> None:
    verdict = sample(world, range(first, first + 40), is_strict=False)
    assert verdict.is_ok, verdict


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("collective", Collective)
def test_two_calls_in_a_row_have_no_fault_in_very_many_orders(collective: Collective, direction: Direction) -> None:
    tuning = Tuning(direction=direction, num_streams=2, is_batched=False, one_shot_bytes=0)
    world = PeerWorld([Call(collective, tunings=(tuning,))] * 2, num_ranks=3, num_streams=2, buffer_bytes=768)
    verdict = explore(world, most_runs=20_000, is_strict=False)
    assert verdict.is_ok, verdict


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("collective", Collective)
def test_a_small_world_has_no_fault_in_any_order(collective: Collective, direction: Direction) -> None:
    for one_shot_bytes in (0, 1 << 18):
        tuning = Tuning(direction=direction, one_shot_bytes=one_shot_bytes)
        verdict = explore(PeerWorld([Call(collective, tunings=(tuning,))]), is_strict=False)
        assert verdict.is_ok, verdict
        assert verdict.is_complete


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_collectives_in_a_row_and_again_from_a_graph(num_ranks: int, tuning: str) -> None:
    check_in_a_row(num_ranks, tuning, 20)
