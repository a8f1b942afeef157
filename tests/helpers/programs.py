"""Python programs that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any


def environment(**more: str) -> dict[str, str]:
    """As here; modules are looked for where this process does. In any thread: pytest removes a variable of its own meanwhile."""
    here = {name: value for name in os.environ if (value := os.environ.get(name)) is not None}
    return {**here, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **more}


def python(*arguments: str, timeout_s: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end."""
    options = {"env": environment(), "capture_output": True, "text": True, "check": False, **options}
    return subprocess.run([sys.executable, *arguments], timeout=timeout_s, **options)


def ray_program(*arguments: str, timeout_s: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments; whatever Ray writes there is gone afterwards, its note of a running cluster too."""
    with tempfile.TemporaryDirectory(prefix="rt", ignore_cleanup_errors=True) as folder:
        env = environment(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=folder, **more)
        return python(*arguments, timeout_s=timeout_s, env=env)


def output_of(*arguments: str, timeout_s: float = 60.0) -> str:
    """What a program writes, which has to end well."""
    done = python(*arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Python with these arguments, and a pipe for each of its streams."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    options = {"env": environment(), "text": True, **pipes, **options}
    return subprocess.Popen([sys.executable, *arguments], **options)
