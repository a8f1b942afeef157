"""Tagged transfers on GPUs for long: five thousand random programs, by copies, staged, and as between hosts."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch", reason="ranks of a torch.distributed group")

from tests.helpers.gpus import num_gpus
from tests.helpers.p2p_programs import ahead, many_random_programs, over
from tests.helpers.ranks import Case, suite

pytestmark = [pytest.mark.timeout(3600), pytest.mark.skipif(not num_gpus(), reason="there is no GPU")]


def _programs(transport: str, num: int) -> dict[str, Case]:
    return {
        f"{first} to {first + 99}": partial(over, transport, partial(many_random_programs, first, 100))
        for first in range(0, num, 100)
    }


TestOf2, TestOf3 = (suite(_programs("auto", 1500), num_ranks, "cuda", limit_s=1700) for num_ranks in (2, 3))
TestStagedOf2, TestStagedOf3 = (
    suite(_programs("staged", 800), num_ranks, "cuda", limit_s=1700) for num_ranks in (2, 3)
)
TestAheadOf2, TestStagedAheadOf2 = (
    suite({name: partial(ahead, case) for name, case in _programs(way, 800).items()}, 2, "cuda", limit_s=1700)
    for way in ("auto", "staged")
)
TestFarOf2 = suite(_programs("tcp", 400), 2, "cuda", limit_s=1700)
