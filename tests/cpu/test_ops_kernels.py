"""The Triton kernels of `crossfade.ops`, in Triton's interpreter: W ranks in one process, one after another; and compiled."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280
VARIABLES = {"tests.helpers.tile_kernels": "1", "tests.helpers.tile_compile": "0"}
"""The programs, and whether Triton is to interpret."""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `dev`)"),
    pytest.mark.timeout(LIMIT_S + 20),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Both at a time, since neither keeps more than one core busy."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    started: dict[str, subprocess.Popen[str]] = {}
    for module, interprets in VARIABLES.items():
        cache = str(tmp_path_factory.mktemp("triton"))
        more = {"PYTHONPATH": path, "TRITON_INTERPRET": interprets, "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        started[module] = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env={**os.environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    yield started
    for program in started.values():
        program.kill()
        program.communicate()


def said(program: subprocess.Popen[str]) -> str:
    out, error = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, error
    return out


def test_the_kernels_give_what_torch_gives_and_count_their_tiles(programs: dict[str, subprocess.Popen[str]]) -> None:
    assert "56 products, 6 worlds, 80 sums" in said(programs["tests.helpers.tile_kernels"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler for this machine may be another one")
def test_the_kernels_compile_for_hopper_with_wide_accesses_and_without_spills(
    programs: dict[str, subprocess.Popen[str]],
) -> None:
    assert "17 kernels" in said(programs["tests.helpers.tile_compile"])
