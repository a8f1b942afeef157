"""The command ``crossfade`` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import crossfade

SOURCE = Path(crossfade.__file__).parents[1]
LIMIT_S = 60
MAIN = "from crossfade.cli.main import app; app(prog_name='crossfade')"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "COLUMNS": "100", "NO_COLOR": "1"}


def crossfade_command(*arguments: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command; with ``before``, after some Python."""
    how = ["-c", f"{before}\n{MAIN}"] if before else ["-m", "crossfade"]
    return subprocess.run(
        [sys.executable, *how, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
