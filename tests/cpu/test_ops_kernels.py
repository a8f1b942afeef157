"""The Triton kernels of `crossfade.ops`, in Triton's interpreter: W ranks in one process, one after another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `gpu`)")
@pytest.mark.timeout(300)
def test_the_kernels_give_what_torch_gives_and_count_their_tiles() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.tile_kernels"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "192 products, 6 worlds, 80 sums" in ran.stdout
