"""Collectives by copy engines on four GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.helpers import peer_gpu_cases as cases
from tests.helpers.device_pair import run_workers

NUM = 4


def test_right_values(tmp_path: Path) -> None:
    args = [(rank, NUM, str(tmp_path / "store"), 150) for rank in range(NUM)]
    for result in run_workers([cases.right_values] * NUM, args, timeout_s=90):
        assert result["wrong"] == []
        assert result["held"] == []


def test_replays(tmp_path: Path) -> None:
    args = [(rank, NUM, str(tmp_path / "store"), 10_000) for rank in range(NUM)]
    for result in run_workers([cases.replays] * NUM, args, timeout_s=90):
        assert result["is_all"]
        assert result["num_wrong"] == 0
        assert result["held"] == []


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, 2])
def test_a_killed_rank(tmp_path: Path, dead: int, is_waiting: bool) -> None:
    args = [(rank, NUM, str(tmp_path / "store"), dead, is_waiting, 0.02) for rank in range(NUM)]
    results = run_workers([cases.killed] * NUM, args, timeout_s=90, dying={dead})
    for rank, result in enumerate(results):
        if rank == dead:
            continue
        assert f"rank {dead} (process {result['pid']}) died" in result["error"]
        assert result["was_running"]
        assert result["release_s"] + result["drained_s"] < 2
        assert result["usable"]
        assert result["held"] == []
        assert result["lost_bytes"] <= 0
