"""A rank is killed with products and their exchanges under way: by copy engines, and by a kernel that reads the other's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.helpers.peer_gpu_cases import check_a_killed_rank


@pytest.mark.timeout(120)
@pytest.mark.parametrize("candidate", ["rounds(rounds=4)", "rounds(rounds=2)"])
def test_the_survivor_is_told_and_goes_on(tmp_path: Path, candidate: str) -> None:
    check_a_killed_rank(2, str(tmp_path / "store"), 1, is_waiting=False, candidate=candidate)
