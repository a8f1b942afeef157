"""The Triton kernels of `crossfade.ops`, in Triton's interpreter: W ranks in one process, one after another."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `gpu`)"
)


def run(module: str, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@needs_triton
@pytest.mark.timeout(300)
def test_the_kernels_give_what_torch_gives_and_count_their_tiles() -> None:
    assert "192 products, 6 worlds, 80 sums" in run("tests.helpers.tile_kernels", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler for this machine may be another one")
@pytest.mark.timeout(300)
def test_the_kernels_compile_for_hopper_with_wide_accesses_and_without_spills(tmp_path: Path) -> None:
    assert "17 kernels" in run("tests.helpers.tile_compile", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
