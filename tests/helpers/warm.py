"""Python programs, each in a process that is forked off one which has imported packages: a new interpreter takes two seconds to
import torch, and half a second for what a command line needs.

This file, as a program, is that process. It takes requests over a socket: the arguments, folder and environment of a program, and
its stdin, stdout and stderr. All of crossfade is imported by the program itself, from where its environment says.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

TORCH_AND_COMPILERS = ("torch", "torch.distributed.pipelining")
"""What programs with torch are forked off; the second brings what is compiled with."""
_MAX_BYTES = 1 << 17
_START_LIMIT_S = 60.0
_starting = threading.Lock()


class _Warm:
    """The tests' side."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs, open(os.devnull, "r+") as null:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            fds = [theirs.fileno()]
            self._process = subprocess.Popen(command, pass_fds=fds, env=variables, stdin=null, stdout=null)

    def ask(self, arguments: Sequence[str], cwd: str, env: dict[str, str], streams: Sequence[int]) -> socket.socket:
        """Where the program's id and its exit code come; who closes this ends the program."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([arguments, cwd, env]).encode()
            socket.send_fds(self._requests, [request], [theirs.fileno(), *streams])
        return mine


class WarmProgram:
    """As `subprocess.Popen` with pipes for stdin and stdout; it leads a session."""

    def __init__(
        self, modules: tuple[str, ...], arguments: Sequence[str], cwd: Path, env: dict[str, str], stderr: IO[Any]
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        self._answers = _warm(modules).ask(arguments, str(cwd), env, (stdin, stdout, stderr.fileno()))
        os.close(stdin)
        os.close(stdout)
        self.stdin, self.stdout = os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb")
        self.pid = _heard(self._answers, arguments, _START_LIMIT_S)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = _heard(self._answers, self.args, timeout)
            self._answers.close()
        return self.returncode

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _heard(answers: socket.socket, arguments: Sequence[str], timeout_s: float | None) -> int:
    """The program's id, and then its exit code."""
    answers.settimeout(timeout_s)
    try:
        return int(answers.recv(_MAX_BYTES) or b"1")
    except TimeoutError:
        assert timeout_s is not None
        raise subprocess.TimeoutExpired([*arguments], timeout_s) from None


@cache
def _started(modules: tuple[str, ...]) -> _Warm:
    """It ends with this process."""
    return _Warm(modules)


def _warm(modules: tuple[str, ...]) -> _Warm:
    with _starting:
        return _started(modules)


def warm_python(
    modules: tuple[str, ...], *arguments: str, cwd: Path, env: dict[str, str], timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end, where these modules are imported already."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8") as stderr,
        open(os.devnull) as stdin,
    ):
        streams = [stream.fileno() for stream in (stdin, stdout, stderr)]
        with _warm(modules).ask(arguments, str(cwd), env, streams) as answers:
            _pid = _heard(answers, arguments, _START_LIMIT_S)
            code = _heard(answers, arguments, timeout_s)
        for stream in (stdout, stderr):
            stream.seek(0)
        return subprocess.CompletedProcess([*arguments], code, stdout.read(), stderr.read())


def _serve(requests: socket.socket) -> list[str]:
    """Returns in programs: their arguments."""
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MAX_BYTES, 4)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended
                pass
        if not data:
            os._exit(0)
        if not os.fork():
            requests.close()
            if not (pid := os.fork()):
                os.close(fds[0])
                os.setsid()
                arguments, cwd, env = json.loads(data)
                return _become(arguments, cwd, env, fds[1:])
            _keep(pid, fds[0])
        for fd in fds:
            os.close(fd)


def _keep(pid: int, asker_fd: int) -> None:
    """Tells the program's id and its exit code, or ends it when nobody wants to know that any more."""
    with suppress(ConnectionError), socket.socket(fileno=os.dup(asker_fd)) as asker:
        asker.send(str(pid).encode())
    poller = select.poll()
    pidfd = os.pidfd_open(pid)
    poller.register(pidfd, select.POLLIN)
    poller.register(asker_fd, 0)
    if pidfd not in dict(poller.poll()):
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with socket.socket(fileno=asker_fd) as asker, suppress(ConnectionError):
        asker.send(str(code).encode())
    os._exit(0)


def _become(arguments: list[str], cwd: str, env: dict[str, str], streams: list[int]) -> list[str]:
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "PYTHONUNBUFFERED" in env:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[:0] = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return arguments


def _run(arguments: list[str]) -> None:
    """As ``python`` does."""
    first, *rest = arguments
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        sys.argv[:] = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
