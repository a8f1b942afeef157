"""The Triton kernels of `crossfade.peers`, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `dev`)")
@pytest.mark.timeout(120)
def test_the_kernels_copy_and_sum_as_torch_does() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.peer_kernels"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "144 sums" in ran.stdout
