"""Collectives by copy engines on two GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.helpers import peer_gpu_cases as cases


def test_right_values(tmp_path: Path) -> None:
    cases.check_right_values(2, str(tmp_path / "store"))


def test_replays(tmp_path: Path) -> None:
    cases.check_replays(2, str(tmp_path / "store"))


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank(tmp_path: Path, dead: int, is_waiting: bool) -> None:
    cases.check_a_killed_rank(2, str(tmp_path / "store"), dead, is_waiting=is_waiting)
