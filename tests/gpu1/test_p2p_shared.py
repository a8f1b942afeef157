"""Tagged transfers between two and three ranks that share one GPU, or have one each."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.p2p_ahead_cases import CASES as AHEAD
from tests.helpers.p2p_ahead_cases import STAGED as AHEAD_STAGED
from tests.helpers.p2p_ahead_cases import USUAL
from tests.helpers.p2p_cases import CASES, FAR, RANDOM, STAGED
from tests.helpers.peer_kills import kill_many
from tests.helpers.ranks import suite

TestTwoRanks = suite({**CASES, **RANDOM}, 2, "cuda", limit_s=200)
TestThreeRanks = suite({**CASES, **RANDOM}, 3, "cuda", limit_s=200)
TestTwoRanksAhead = suite({**AHEAD, **USUAL}, 2, "cuda", limit_s=200)
TestTwoRanksAheadStaged = suite(AHEAD_STAGED, 2, "cuda", limit_s=200)
TestTwoRanksStaged = suite(STAGED, 2, "cuda", limit_s=200)
TestThreeRanksStaged = suite(STAGED, 3, "cuda", limit_s=200)
TestTwoRanksFar = suite(FAR, 2, "cuda", limit_s=200)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["p2p_gpu", "p2p_gpu_ahead", "p2p_gpu_staged", "p2p_gpu_ahead_staged"])
def test_a_rank_that_is_killed_at_any_moment(what: str) -> None:
    assert min(kill_many(0, 24, 280, what).values()) >= 6
