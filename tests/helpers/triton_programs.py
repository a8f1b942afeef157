"""Starts programs of the helpers that use Triton: it reads once, when it is imported, whether it is to interpret."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import environment, started

ROOT = Path(__file__).parents[2]
LIMIT_S = 280

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `dev`)"
)


def start(module: str, *, interprets: bool, **variables: str) -> subprocess.Popen[str]:
    """With one thread for products: several programs run at a time."""
    more = {"TRITON_INTERPRET": str(int(interprets)), "OMP_NUM_THREADS": "1", **variables}
    return started("-m", module, env=environment(**more))


def said(program: subprocess.Popen[str]) -> str:
    """What it printed; it has to end well, and is ended in any case."""
    try:
        out, error = program.communicate(timeout=LIMIT_S)
    finally:
        program.kill()
    assert program.returncode == 0, error
    return out
