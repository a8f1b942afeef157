"""Ranks that are killed at any moment, many times; ``tests/cpu/test_peers.py`` has a few."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="peers are ranks of a torch.distributed group")

from tests.helpers.peer_cases import CASES, run_cases
from tests.helpers.peer_verdicts import kill_many


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first_seed", range(1000, 2000, 100))
def test_a_killed_rank_is_named_and_the_others_go_on(first_seed: int) -> None:
    kill_many(first_seed, 100, 500)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [3, 4, 5])
def test_ranks_get_what_plain_torch_gives(num_ranks: int, tmp_path: Path) -> None:
    run_cases(num_ranks, tmp_path, *CASES, timeout_s=500)
