"""What actors print while nobody reads the driver's stdout, or somebody does so slowly."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time

import pytest

import crossfade
from tests.helpers.programs import started

pytestmark = pytest.mark.timeout(60)

_NUM_LINES = 2_000
_LINE = "x" * 40

_PROGRAM = f"""
import crossfade, os, sys, time

@crossfade.remote
class Printer:
    def say(self):
        for number in range({_NUM_LINES}):
            print(number, "{_LINE}")

printer = Printer.remote()
printer.say.remote().get()
if "kill" in sys.argv:
    crossfade.kill(printer)
before = time.monotonic()
crossfade.shutdown()
print("shut down within", round(time.monotonic() - before, 1), "s", file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [(), ("kill",)], ids=["alive", "dead"])
def test_shutdown_gives_up_where_nobody_reads_and_says_what_was_not_shown(arguments: tuple[str, ...]) -> None:
    with started("-c", _PROGRAM, *arguments) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            assert program.wait(timeout=30) == 0  # nothing has been read until then
        finally:
            program.kill()
        shown, told = program.stdout.read(), program.stderr.read()
    found = re.search(r"nobody reads stdout, so this was not shown: (\d+) lines \((\d+) bytes\) of Printer0\n", told)
    assert found, told
    assert shown.count("\n") + int(found[1]) == _NUM_LINES
    prefix = shown.index(") ") + 2
    assert len(shown) + int(found[2]) == sum(prefix + len(f"{number} {_LINE}\n") for number in range(_NUM_LINES))
    waited = re.search(r"shut down within (\S+) s", told)
    assert waited
    assert 1 <= float(waited[1]) < 10


def test_nothing_is_lost_where_somebody_reads_slowly() -> None:
    """Far less than a page in a second, and less than the pipe holds in all the time that the reader takes."""
    with started("-c", _PROGRAM) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            out_fd, shown = program.stdout.fileno(), b""
            while len(shown) < 1000:
                time.sleep(0.3)  # that is what a slow reader does
                shown += os.read(out_fd, 100)
            while more := os.read(out_fd, 1 << 16):
                shown += more
            told = program.stderr.read()
        finally:
            program.kill()
    assert "not shown" not in told
    lines = shown.decode().splitlines()
    assert [line.split()[-2] for line in lines] == [str(number) for number in range(_NUM_LINES)]


class Printer:
    def say(self, text: str) -> None:
        print(text)


class _Stuck(io.StringIO):
    """Takes nothing, until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.stands = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.stands.set()
        self.may.wait(30)
        return super().write(text)


def test_shutdown_gives_up_on_a_stdout_that_does_not_return(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = _Stuck()
    monkeypatch.setattr(sys, "stdout", stuck)
    crossfade.remote(Printer).remote().say.remote("one\ntwo").get()
    assert stuck.stands.wait(10)
    (thread,) = [each for each in threading.enumerate() if each.name == "crossfade-output"]
    num_before = len(os.listdir("/proc/self/fd"))
    try:
        crossfade.shutdown()
        assert "so this was not shown: 2 lines (" in capsys.readouterr().err
        assert len(os.listdir("/proc/self/fd")) < num_before
    finally:
        stuck.may.set()
    thread.join(10)
    assert not thread.is_alive()
