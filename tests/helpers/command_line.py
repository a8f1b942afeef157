"""The command ``crossfade`` in a process of its own, and consoles that its parts write to."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

from rich.console import Console

import crossfade
from tests.helpers import programs
from tests.helpers.warm import warm_python

SOURCE = Path(crossfade.__file__).parents[1]
IMPORTED = ("cloudpickle", "msgspec", "numpy", "rich.console", "typer")
LIMIT_S = 60
MAIN = "from crossfade.cli.main import app; app(prog_name='crossfade')"


def environment(**more: str) -> dict[str, str]:
    fixed = {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "COLUMNS": "100", "NO_COLOR": "1"}
    return programs.environment(**{**fixed, **more})


def crossfade_command(
    *arguments: str, folder: Path, before: str = "", imported: tuple[str, ...] = IMPORTED
) -> subprocess.CompletedProcess[str]:
    """Runs the command, where these modules are imported already, or in a new interpreter; with ``before``, after some Python."""
    how = ["-c", f"{before}\n{MAIN}"] if before else ["-m", "crossfade"]
    if not imported:
        return programs.python(*how, *arguments, cwd=folder, env=environment(), timeout_s=LIMIT_S)
    return warm_python(imported, *how, *arguments, cwd=folder, env=environment(), timeout_s=LIMIT_S)


def console(*, is_quiet: bool = False) -> Console:
    return Console(file=io.StringIO(), width=160, highlight=False, force_terminal=False, quiet=is_quiet)


def text_of(made: Console) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()
