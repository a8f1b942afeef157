"""The candidate ``tiles`` between processes, on CPU tensors and in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

from tests.helpers.ops_cases import run_cases
from tests.helpers.ops_tile_cases import TILE_CASES
from tests.helpers.triton_programs import needs_triton

LIMIT_S = 120.0
NUM_RANKS = {"tile_shapes": 3}
"""Of cases that take more than two."""

pytestmark = needs_triton


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What every rank said of each case; the processes are shared by all that take as many."""
    found: dict[str, list[str]] = {}
    for num_ranks in (2, 3):
        names = [name for name in TILE_CASES if NUM_RANKS.get(name, 2) == num_ranks]
        store = str(tmp_path_factory.mktemp("ranks") / "store")
        found |= run_cases(num_ranks, "cpu", store, names, LIMIT_S, TILE_CASES, interprets=True)
    return found


@pytest.mark.timeout(2 * LIMIT_S + 20)
@pytest.mark.parametrize("name", TILE_CASES)
def test_ranks_get_what_one_process_computes(said: dict[str, list[str]], name: str) -> None:
    for rank, answer in enumerate(said[name]):
        assert answer == "ok", f"rank {rank}: {answer}"
