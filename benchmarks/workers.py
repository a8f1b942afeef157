"""Processes that are measured, held at arm's length: each answer has a time limit, and a worker that hangs is ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]


class WorkerFailed(Exception):
    """A worker answered with an error, not in time, or not at all."""


def environment(more_path: Sequence[str] = (), source: Path = ROOT / "src") -> dict[str, str]:
    """The environment in which this tree's crossfade is imported, installed or not, or that of another ``source``."""
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *more_path, *([path] if path else [])])}


def without_folders(text: str) -> str:
    """``text`` with the names of files in the place of their paths: reports say nothing about the machine's folders."""
    return re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", text)


class Worker:
    """A subprocess of ``python -m MODULE ARGUMENTS`` that reads requests and answers with lines of JSON.

    Args:
        module: the module to run.
        arguments: its arguments.
        start_limit_s: how long it may take until it is ready.
        python: the interpreter.
        more_path: folders to find modules in, beside this tree.
        source: where crossfade is.

    Raises:
        WorkerFailed: it did not become ready.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        start_limit_s: float = 90,
        python: str = sys.executable,
        more_path: Sequence[str] = (),
        source: Path = ROOT / "src",
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = self._begin([python, "-m", module, *arguments], environment(more_path, source))
        self._unread = b""
        self.init_us: float = self._receive(start_limit_s)["result"]["init_us"]

    def _begin(self, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        """Whether another request may be sent."""
        return self._process.returncode is None

    def begin(self, request: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        """Sends a request and returns its result. `finish` has to follow.

        Raises:
            WorkerFailed: no result came; the worker is ended if it did not answer at all.
        """
        pipe = self._process.stdin
        if pipe is None or not self.is_alive:
            raise WorkerFailed("the worker is gone")
        try:
            pipe.write(json.dumps(request).encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise self._end(f"the worker is gone: {error}") from None
        result: dict[str, Any] = self._receive(limit_s)["result"]
        return result

    def finish(self, *, limit_s: float) -> None:
        """Waits until the request has let go of everything it started.

        Raises:
            WorkerFailed: it did not; the worker is ended.
        """
        self._receive(limit_s)

    def _receive(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        pipe = self._process.stdout
        if pipe is None:
            raise WorkerFailed("the worker has no pipe")
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._end(f"no answer within {limit_s:g} s")
            piece = os.read(pipe.fileno(), 1 << 20)
            if not piece:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)  # it may still be writing why
                raise self._end("the worker ended")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise WorkerFailed(without_folders(message["error"]))
        return message

    def _end(self, reason: str) -> WorkerFailed:
        kill_tree(self._process)
        _kill_group(self._process.pid)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return WorkerFailed("; ".join([reason, *map(without_folders, last)]))

    def kill(self) -> None:
        """Ends it at once, from any thread; who waits for its answer gets an error. Idempotent."""
        if self._process.returncode is None:
            kill_tree(self._process)

    def processes(self) -> set[int]:
        """The ids of the worker's process and of all below it."""
        return {self._process.pid, *descendants(self._process.pid)}

    def close(self, *, limit_s: float = 20) -> None:
        """Lets the worker end by itself; ends it after ``limit_s``."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            kill_tree(self._process)
        _kill_group(self._process.pid)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def descendants(pid: int) -> set[int]:
    """Processes that ``pid`` started, and those that they started, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    unseen = [pid]
    while unseen:
        below = children.get(unseen.pop(), [])
        found.update(below)
        unseen += below
    return found


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that was started here, with everything below it, and reaps it."""
    below = descendants(process.pid)
    process.kill()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _kill_group(pid: int) -> None:
    """Kills what a worker left in its process group; it began a session of its own, so nobody else is in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time that processes have used since they started.

    The scheduler's own count where the kernel shows it (per thread, in nanoseconds); else that of ``stat``, in ticks of
    usually 10 ms.
    """
    return sum(_cpu_seconds(Path("/proc") / str(pid)) for pid in pids)


def _cpu_seconds(process: Path) -> float:
    try:
        threads = list((process / "task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        pass
    try:
        fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
