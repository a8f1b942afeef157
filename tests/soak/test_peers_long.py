"""Ranks that are killed at any moment, many times; ``tests/cpu/test_peers.py`` has a few."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="peers are ranks of a torch.distributed group")

from tests.helpers.peer_cases import CASES
from tests.helpers.peer_verdicts import kill_many
from tests.helpers.ranks import suite

TestThreeRanks, TestFourRanks, TestFiveRanks = (suite(CASES, num_ranks, limit_s=500) for num_ranks in (3, 4, 5))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first_seed", range(1000, 2000, 100))
def test_a_killed_rank_is_named_and_the_others_go_on(first_seed: int) -> None:
    kill_many(first_seed, 100, 500)
