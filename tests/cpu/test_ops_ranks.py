"""Operators of `crossfade.ops` between processes, on CPU tensors: every candidate against products in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

from tests.helpers.ops_cases import CASES, run_cases

LIMIT_S = 150.0


@pytest.fixture(scope="module", params=[3])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What every rank said of each case; the processes are shared by all of them."""
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    return run_cases(request.param, "cpu", store, list(CASES), LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", CASES)
def test_ranks_get_what_one_process_computes(said: dict[str, list[str]], name: str) -> None:
    for rank, answer in enumerate(said[name]):
        assert answer == "ok", f"rank {rank}: {answer}"
