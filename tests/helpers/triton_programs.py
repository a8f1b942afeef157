"""Runs programs of the helpers that use Triton: it reads once, when it is imported, whether it is to interpret; torch alone does
not import it.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import environment
from tests.helpers.sessions import TORCH
from tests.helpers.warm import warm_python

ROOT = Path(__file__).parents[2]
LIMIT_S = 280

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `dev`)"
)


def run(module: str, *, interprets: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    """With one thread for products: several programs run at a time."""
    more = {"TRITON_INTERPRET": str(int(interprets)), "OMP_NUM_THREADS": "1", **variables}
    return warm_python(TORCH, "-m", module, cwd=ROOT, env=environment(**more), timeout_s=LIMIT_S)


def said(program: subprocess.CompletedProcess[str]) -> str:
    """What it printed; it has to have ended well."""
    assert program.returncode == 0, program.stderr
    return program.stdout
