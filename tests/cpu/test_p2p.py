"""Tagged transfers between the ranks of a torch.distributed group, on shared memory in the place of GPUs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="ranks of a torch.distributed group")

from tests.helpers.p2p_cases import CASES, RANDOM  # noqa: E402
from tests.helpers.peer_kills import kill_many  # noqa: E402
from tests.helpers.ranks import suite  # noqa: E402

TestTwoRanks = suite({**CASES, **RANDOM}, 2, limit_s=100)
TestThreeRanks = suite({**CASES, **RANDOM}, 3, limit_s=100)


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_at_any_moment() -> None:
    assert min(kill_many(0, 12, 100, "p2p").values()) >= 3
