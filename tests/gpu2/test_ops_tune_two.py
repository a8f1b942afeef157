"""The tuner on two GPUs: what it measures, how the ranks agree, and that it keeps still inside a capture."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.helpers.tuning_gpu_cases import check_tuned


@pytest.mark.timeout(120)
def test_two_gpus_measure_and_agree(tmp_path: Path) -> None:
    check_tuned(2, str(tmp_path))
