"""Ranks of a group for long: operators, collectives, kills, and worlds on the fake machine."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch", reason="peers are ranks of a torch.distributed group")

from crossfade.peers import steps
from tests.helpers.ops_cases import LONG_CASES
from tests.helpers.ops_gradient_cases import CASES as GRADIENT_CASES
from tests.helpers.ops_modules import CASES as MODULE_CASES
from tests.helpers.p2p_programs import many_random_programs, over
from tests.helpers.peer_cases import CASES
from tests.helpers.peer_kills import kill_many
from tests.helpers.ranks import suite
from tests.helpers.worlds.kit import assert_sound_in_all_orders
from tests.helpers.worlds.ranks import Call, Collective, PeerWorld
from tests.unit.test_peers_proof import SHOTS, check_in_a_row

pytestmark = pytest.mark.timeout(3600)

TestOf2, TestOf3, TestOf4, TestOf5 = (suite(LONG_CASES, num_ranks, limit_s=1700) for num_ranks in (2, 3, 4, 5))
TestGradientsOf2, TestGradientsOf4, TestGradientsOf5 = (suite(GRADIENT_CASES, num, limit_s=380) for num in (2, 4, 5))
TestModulesOf2, TestModulesOf4, TestModulesOf6 = (suite(MODULE_CASES, num, limit_s=380) for num in (2, 4, 6))
"""48 features are shared out."""
TestTransfersOf2, TestTransfersOf3, TestTransfersOf4 = (
    suite({f"{first}": partial(many_random_programs, first, 100) for first in range(0, 2000, 100)}, num, limit_s=900)
    for num in (2, 3, 4)
)
TestStaged, TestFar = (
    suite(
        {f"{first}": partial(over, way, partial(many_random_programs, first, 100)) for first in range(0, 1000, 100)},
        3,
        limit_s=900,
    )
    for way in ("staged", "tcp")
)
TestPeersOf3, TestPeersOf4, TestPeersOf5 = (suite(CASES, num, limit_s=500) for num in (3, 4, 5))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first_seed", range(1000, 2000, 100))
def test_a_killed_rank_is_named_and_the_others_go_on(first_seed: int) -> None:
    kill_many(first_seed, 100, 500)
    for what in ("p2p", "p2p_staged", "p2p_far"):
        kill_many(first_seed, 20, 200, what)


@pytest.mark.parametrize("collective", Collective)
def test_two_calls_in_a_row_have_no_fault_in_very_many_orders(
    collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "ONE_SHOT_BYTES", 0)
    world = PeerWorld([Call(collective)] * 2, num_ranks=3, buffer_bytes=768)
    assert_sound_in_all_orders(world, most_runs=20_000, is_strict=False)


@SHOTS
@pytest.mark.parametrize("collective", Collective)
def test_a_small_world_has_no_fault_in_any_order(
    collective: Collective, shots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shots == 2:
        monkeypatch.setattr(steps, "ONE_SHOT_BYTES", 0)
    assert_sound_in_all_orders(PeerWorld([Call(collective)]), is_strict=False)


@SHOTS
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_collectives_in_a_row_and_again_from_a_graph(
    num_ranks: int, shots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_in_a_row(num_ranks, shots, 20, monkeypatch)
