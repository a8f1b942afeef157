"""What actors print is shown by the driver, each line with who printed it."""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import crossfade
from tests.helpers.programs import python


class Printer:
    def say(self, text: str, end: str = "\n") -> int:
        print(text, end=end)
        return os.getpid()

    def complain(self, text: str) -> int:
        print(text, file=sys.stderr)
        return os.getpid()

    def die_saying(self, text: str) -> None:
        os.write(1, text.encode())
        os._exit(3)

    def leave_a_child(self) -> int:
        """Starts a process that holds the pipes and sleeps; its pid."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


@pytest.fixture
def session() -> Iterator[None]:
    yield
    crossfade.shutdown()


def _run(code: str) -> subprocess.CompletedProcess[str]:
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done


def test_lines_have_the_actors_name_and_pid(session: None, capsys: pytest.CaptureFixture[str]) -> None:
    printer = crossfade.remote(Printer).remote()
    pid = printer.say.remote("one\ntwo").get()
    printer.complain.remote("three").get()
    printer.say.remote("no end", end="").get()
    crossfade.shutdown()
    shown = capsys.readouterr()
    prefix = f"(Printer0 pid={pid}) "
    assert shown.out == f"{prefix}one\n{prefix}two\n{prefix}no end\n"
    assert shown.err == f"{prefix}three\n"


def test_it_goes_to_what_sys_stdout_is_at_that_moment(session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Notebook(io.StringIO):
        def write(self, text: str) -> int:
            number = super().write(text)
            if "after" in text:  # and not what was said before, which may come late
                seen.set()
            return number

    seen = threading.Event()
    printer = crossfade.remote(Printer).remote()
    printer.say.remote("before").get()
    notebook = Notebook()
    monkeypatch.setattr(sys, "stdout", notebook)
    printer.say.remote("after").get()
    assert seen.wait(10)
    monkeypatch.setattr(sys, "stdout", None)  # as in a program without a console
    printer.say.remote("nowhere").get()
    crossfade.shutdown()
    assert "after" in notebook.getvalue()


def test_last_words_are_shown_before_shutdown(session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(io.StringIO):
        def write(self, text: str) -> int:
            number = super().write(text)
            if "words" in text:
                seen.set()
            return number

    seen = threading.Event()
    monkeypatch.setattr(sys, "stdout", Waiting())
    printer = crossfade.remote(Printer).remote()
    ref = printer.die_saying.remote("last words")  # without the end of a line
    with pytest.raises(crossfade.ActorDiedError):
        ref.get(timeout=10)
    assert seen.wait(10)


@pytest.mark.timeout(30)
def test_a_grandchild_that_keeps_the_pipes_holds_nobody_up(session: None, capsys: pytest.CaptureFixture[str]) -> None:
    printer = crossfade.remote(Printer).remote()
    child = printer.leave_a_child.remote().get()
    try:
        with pytest.raises(crossfade.ActorDiedError):
            printer.die_saying.remote("gone").get(timeout=10)
        crossfade.shutdown()
        assert "gone" in capsys.readouterr().out
    finally:
        os.kill(child, 9)


def test_nothing_is_lost_of_much_output(session: None, capsys: pytest.CaptureFixture[str]) -> None:
    printer = crossfade.remote(Printer).remote()
    printer.say.remote("\n".join(f"line {number}" for number in range(50_000))).get(timeout=60)
    crossfade.shutdown()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 50_000
    assert [line.rpartition(" ")[2] for line in lines] == [str(number) for number in range(50_000)]


def test_without_log_to_driver_output_is_inherited() -> None:
    done = _run(
        "import crossfade\n@crossfade.remote\nclass A:\n    def f(self): print('plain')\n"
        "crossfade.init(log_to_driver=False)\nA.remote().f.remote().get()\n"
    )
    assert done.stdout == "plain\n"


def test_a_script_shows_everything_at_its_end() -> None:
    done = _run(
        "import crossfade, sys\n@crossfade.remote\nclass A:\n"
        "    def f(self): print('out'); print('err', file=sys.stderr)\nA.remote().f.remote().get()\n"
    )
    assert re.fullmatch(r"\(A0 pid=\d+\) out\n", done.stdout)
    assert re.fullmatch(r"\(A0 pid=\d+\) err\n", done.stderr)


def test_a_forked_child_has_none_of_it() -> None:
    done = _run(
        "import crossfade, os, sys, warnings\nwarnings.simplefilter('ignore')\n@crossfade.remote\nclass A:\n"
        "    def f(self, x): print(x)\na = A.remote()\na.f.remote('one').get()\n"
        "if (pid := os.fork()) == 0:\n"
        "    pipes = [fd for fd in os.listdir('/proc/self/fd') if fd > '2' and os.path.exists(f'/proc/self/fd/{fd}')\n"
        "             and os.readlink(f'/proc/self/fd/{fd}').startswith('pipe')]\n"
        "    sys.stdout.write(f'child {len(pipes)}\\n')\n    sys.exit(0)\n"
        "os.waitpid(pid, 0)\na.f.remote('two').get()\n"
    )
    assert sorted(re.sub(r"pid=\d+", "pid=N", done.stdout).splitlines()) == [
        "(A0 pid=N) one",
        "(A0 pid=N) two",
        "child 0",
    ]


def test_idle_output_takes_no_cpu_and_the_thread_ends_with_the_session(session: None) -> None:
    printer = crossfade.remote(Printer).remote()
    printer.say.remote("once").get()
    (thread,) = [each for each in threading.enumerate() if each.name == "crossfade-output"]
    clock = time_of(thread)
    printer.say.remote("").get()
    assert time_of(thread) - clock < 0.1
    crossfade.shutdown()
    assert not thread.is_alive()


def time_of(thread: threading.Thread) -> float:
    """CPU seconds that a thread has used."""
    import time

    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def test_the_thread_starts_with_the_first_actor(session: None) -> None:
    crossfade.init()
    assert not [each for each in threading.enumerate() if each.name == "crossfade-output"]


def test_sessions_leave_no_descriptor(session: None) -> None:
    counts: list[Any] = []
    for _ in range(4):
        crossfade.remote(Printer).remote().say.remote("x").get()
        crossfade.shutdown()
        gc.collect()  # a session is part of cycles
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[-1]
