"""Starts programs of the helpers that use Triton: it reads once, when it is imported, whether it is to interpret."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `dev`)"
)


def start(module: str, *, interprets: bool, **variables: str) -> subprocess.Popen[str]:
    """With one thread for products: several programs run at a time."""
    more = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "TRITON_INTERPRET": str(int(interprets)),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(program: subprocess.Popen[str]) -> str:
    """What it printed; it has to end well, and is ended in any case."""
    try:
        out, error = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
    assert program.returncode == 0, error
    return out
