"""Whole programs that preload a module: their template ends with them, however they end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.ended import await_no_process
from tests.helpers.programs import output_of, started

MODULE = "colorsys"  # which nothing else imports

_PROGRAM = f"""
import os, sys, crossfade
crossfade.init(preload={MODULE!r})

class Facts:
    def parent(self):
        return os.getpid(), os.getppid()

actors = [crossfade.remote(Facts).remote() for _ in range(2)]
for pid, parent in crossfade.get([actor.parent.remote() for actor in actors]):
    print(pid, parent, flush=True)
"""


@pytest.mark.parametrize("end", ["", "crossfade.shutdown()", "if os.fork() == 0:\n    sys.exit()\nos.wait()"])
def test_the_template_ends_with_the_program(end: str) -> None:
    said = output_of("-c", f"{_PROGRAM}\n{end}")
    for pid in map(int, said.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_template_ends_with_a_killed_program() -> None:
    with started("-c", f"{_PROGRAM}\nsys.stdin.read()") as program:
        assert program.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in program.stdout.readline().split()]
        program.kill()
    for pid in pids:
        await_no_process(pid)


def test_a_forked_driver_leaves_its_parents_template_alone() -> None:
    program = f"""{_PROGRAM}
pid = os.fork()
if pid == 0:
    print(*actors[:0], *crossfade.remote(Facts).remote().parent.remote().get()[:0], flush=True)
    sys.exit()
os.waitpid(pid, 0)
assert actors[0].parent.remote().get()[1] == crossfade.remote(Facts).remote().parent.remote().get()[1]
"""
    output_of("-c", program)


def test_actors_without_pipes_have_the_drivers_stdout_of_that_moment(tmp_path: Path) -> None:
    program = f"""
import os, crossfade

class Facts:
    def say(self, text):
        print(text)

def say(text):
    crossfade.get(crossfade.remote(Facts).remote().say.remote(text))

crossfade.init(preload={MODULE!r}, log_to_driver=False)
say("to the first")
os.dup2(os.open({str(tmp_path / "second")!r}, os.O_CREAT | os.O_WRONLY), 1)
say("to the second")
"""
    assert output_of("-c", program) == "to the first\n"
    assert (tmp_path / "second").read_text() == "to the second\n"
