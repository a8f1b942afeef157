"""Ranks on four GPUs: operators, every candidate against products in float64; collectives by copy engines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.helpers.ops_cases import GPU_CASES
from tests.helpers.peer_gpu_cases import check_a_killed_rank, check_replays, check_right_values
from tests.helpers.ranks import suite

TestOperators = suite(GPU_CASES, 4, "cuda", limit_s=300)


def test_right_values(tmp_path: Path) -> None:
    check_right_values(4, str(tmp_path / "store"))


def test_replays(tmp_path: Path) -> None:
    check_replays(4, str(tmp_path / "store"))


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, 2])
def test_a_killed_rank(tmp_path: Path, dead: int, is_waiting: bool) -> None:
    check_a_killed_rank(4, str(tmp_path / "store"), dead, is_waiting=is_waiting)
