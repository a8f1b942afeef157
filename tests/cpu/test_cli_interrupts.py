"""Ctrl-C while a command runs: its exit code, and no process that stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.command_line import LIMIT_S, crossfade_command, environment
from tests.helpers.programs import started


def processes_of_session(session: int) -> list[str]:
    """The processes of a session, without those that have ended and only await their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(sid) == session and state != "Z":
                found.append(f"{entry.name} {state}")
    return found


def test_ctrl_c_inside_an_exec_of_text_exits_130(tmp_path: Path) -> None:
    """`python -m` ends itself by SIGINT where such an interrupt was the last thing that an exec saw."""
    (tmp_path / "interrupted.py").write_text("def chain():\n    exec('raise KeyboardInterrupt')\n")
    done = crossfade_command("plan", "interrupted:chain", folder=tmp_path)
    assert done.returncode == 130, done.stderr


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        (["demo"], "Actors started"),
        (["demo"], "crossfade "),
        (["bench", "hops", "--num", "1000000"], "crossfade "),
        (["plan", "endless:chain"], "waiting"),
    ],
)
def test_ctrl_c_exits_130_and_leaves_no_process(tmp_path: Path, arguments: list[str], when: str) -> None:
    (tmp_path / "endless.py").write_text("def chain():\n    print('waiting')\n    while True:\n        pass\n")
    process = started("-m", "crossfade", *arguments, cwd=tmp_path, env=environment(), start_new_session=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith(when) for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, errors
        assert errors == ""
        assert processes_of_session(process.pid) == []
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
