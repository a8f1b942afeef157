"""Whole programs that preload a module: their template ends with them, however they end."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from crossfade.engines.interpreter import Interpreter
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


def test_the_template_of_a_killed_program_does_not_import_on(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    source = f"import os, time\nprint(os.getpid(), file=open({str(told)!r}, 'w'))\nopen({str(told)!r}).read()\n"
    (tmp_path / "never_imported.py").write_text(source)
    program = f"import sys, crossfade\nsys.path.insert(0, {str(tmp_path)!r})\ncrossfade.init(preload='never_imported')"
    with started("-c", f"{program}\nsys.stdin.read()") as driver:
        pid = int(told.read_text())
        driver.kill()
    try:
        await_no_process(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_template_of_a_program_that_has_ended_imports_nothing(module_folder: Path) -> None:
    (module_folder / "ends_the_process.py").write_text("import os\nos._exit(7)\n")
    with started("-c", "") as driver:
        driver_pidfd = os.pidfd_open(driver.pid)
        driver.wait()
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline_fd, fd = os.pipe()
    os.close(fd)
    with requests, theirs:
        fds = theirs.fileno(), driver_pidfd, lifeline_fd
        template = Interpreter("", "crossfade.engines.template", ("ends_the_process",), (None, None), fds)
        assert template.await_exit(-1) == 0
    for fd in (driver_pidfd, lifeline_fd):
        os.close(fd)


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


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("modules", [(), (MODULE,)])
def test_actors_of_a_driver_without_standard_streams(
    modules: tuple[str, ...], closed: tuple[int, ...], tmp_path: Path
) -> None:
    program = f"""
import os, sys, crossfade
for fd in {closed}:
    os.close(fd)

class Prints:
    def streams(self):
        print("said")
        print("said", file=sys.stderr)
        return [os.readlink(f"/proc/self/fd/{{fd}}") for fd in {closed}]

crossfade.init(preload={modules}, log_to_driver=False)
found = [crossfade.remote(Prints).remote().streams.remote() for _ in range(2)]
open({str(tmp_path / "found")!r}, "w").write(str(crossfade.get(found, timeout=30)))
"""
    output_of("-c", program)
    assert (tmp_path / "found").read_text() == str([["/dev/null"] * len(closed)] * 2)
