"""Operators of `crossfade.ops` between four ranks on one GPU, or as many as there are: several peers, which two ranks lack."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.ops_cases import GPU_CASES, run_cases

NUM_RANKS = 4
LIMIT_S = 400.0


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What every rank said of each case; the processes are shared by all of them."""
    return run_cases(NUM_RANKS, "cuda", str(tmp_path_factory.mktemp("ranks") / "store"), list(GPU_CASES), LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", GPU_CASES)
def test_ranks_get_what_one_process_computes(said: dict[str, list[str]], name: str) -> None:
    for rank, answer in enumerate(said[name]):
        assert answer == "ok", f"rank {rank}: {answer}"
