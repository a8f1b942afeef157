"""Runs the program of `tests.helpers.interrupt_storm`, and says what it has counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["storm"]

_ROOT = Path(__file__).parents[2]
_MARGIN_S = 120.0


def storm(kind: str, duration_s: float, seed: int) -> dict[str, Any]:
    """A storm of that signal, for so long.

    Raises:
        AssertionError: something was lost, or the program hangs.
    """
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.helpers.interrupt_storm",
        kind,
        str(duration_s),
        str(seed),
    ]
    ran = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=duration_s + _MARGIN_S, check=False
    )
    assert ran.returncode == 0, f"seed {seed}: {ran.returncode}\n{ran.stderr}"
    counts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return counts
