"""The processes of a calibration, from the side of who started them: one for each GPU, a time limit for each step, an end for all.

What fails a step (an error on a rank, a rank that dies, the time limit) ends all processes: what is pending on their devices is
unknown. The next step starts new ones. However the calibration ends, by Ctrl-C or by SIGKILL too, they end with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from mmap import mmap
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from crossfade.errors import CrossfadeError
from crossfade.host.interpreter import code_to_run, search_path
from crossfade.host.memory import Memory
from crossfade.host.processes import describe_exit
from crossfade.profile.context import make_shared
from crossfade.profile.lines import Line
from crossfade.profile.steps import NCCL, Step

_START_LIMIT_S, _JOIN_LIMIT_S, _CLOSE_LIMIT_S = 60.0, 40.0, 5.0
_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # staged ends have three streams each
    "CUDA_LAUNCH_BLOCKING": "0",  # a launch behind the gate must not wait for it,
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # nor may NCCL's
    "NCCL_SOCKET_IFNAME": "lo",  # NCCL's own set-up listens; on this host only
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""What every process has, whatever its user has set."""


class StepFailed(CrossfadeError):
    """A step gave nothing; the message says why."""


class Crew(Protocol):
    """What runs steps."""

    def run(self, step: Step) -> Any:
        """What the step's measure returns on its first rank.

        Raises:
            StepFailed: it failed.
        """

    def close(self) -> None:
        """Ends everything. Idempotent."""


class Processes:
    """A process for each rank, started by the first step."""

    def __init__(self, num_ranks: int, module: str = "crossfade.profile.worker") -> None:
        self.num_started = 0  # processes that were ever started
        self._num_ranks = num_ranks
        self._module = module
        self._folder: Path | None = None
        self._ranks: list[_Process] = []
        self._gate: mmap | None = None
        self._num_meetings = 0
        self._has_joined = False

    def run(self, step: Step) -> Any:
        try:
            if not self._ranks:
                self._start()
            if step.transport == NCCL and not self._has_joined:
                store = str(self._store())
                self._perform(Step("join", tuple(range(self._num_ranks)), work=store, limit_s=_JOIN_LIMIT_S))
                self._has_joined = True
            return self._perform(step)
        except BaseException:
            self._end()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [process.popen.pid for process in self._ranks]

    def _start(self) -> None:
        self._num_meetings, self._has_joined = 0, False
        shared = make_shared(self._num_ranks)
        try:
            self._gate = shared[0].map(shared[0].size_bytes)
            fds = [memory.fd for memory in shared]
            for rank in range(self._num_ranks):
                self._ranks.append(_Process(self._module, fds, rank, self._num_ranks))
                self.num_started += 1
        finally:
            for memory in shared:
                memory.close()
        self._collect(list(range(self._num_ranks)), _START_LIMIT_S, "starting")

    def _store(self) -> Path:
        """A path for NCCL's ranks to find each other, a new one for each crew."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="crossfade-topology-"))
        return self._folder / f"store-{self.num_started}"

    def _perform(self, step: Step) -> Any:
        for rank in step.ranks:
            self._send(rank, step=asdict(step), num_meetings=self._num_meetings)
        return self._collect(list(step.ranks), step.limit_s, str(step))

    def _send(self, rank: int, **message: Any) -> None:
        with suppress(OSError):  # a rank that has died is found out by its silence
            self._ranks[rank].line.send(**message)

    def _collect(self, ranks: list[int], limit_s: float, what: str) -> Any:
        """Goes through meetings until all ranks are done; gives what the first one returned."""
        deadline = time.monotonic() + limit_s
        while True:
            answers = self._answers(ranks, deadline, f"{what} took over {limit_s:g} s")
            if all("done" in answer for answer in answers.values()):
                return answers[ranks[0]]["done"]
            if not all("say" in answer for answer in answers.values()):
                raise StepFailed(f"{what}: some ranks are done and others are not: this is a bug in crossfade")
            self._num_meetings += 1
            if self._gate is not None:
                memoryview(self._gate).cast("I")[0] = self._num_meetings
            told = {rank: answer["say"] for rank, answer in answers.items()}
            for rank in ranks:
                self._send(rank, told=told)

    def _answers(self, ranks: list[int], deadline: float, too_late: str) -> dict[int, dict[str, Any]]:
        """One message of each rank. The time limit is for its first byte: messages are short, and sent in one piece."""
        answers: dict[int, dict[str, Any]] = {}
        missing = list(ranks)
        while missing:
            ready = wait([self._ranks[rank].line.fileno() for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise StepFailed(f"{too_late}: waited for GPU {', '.join(map(str, missing))}")
            answers |= {rank: self._answer(rank) for rank in missing if self._ranks[rank].line.fileno() in ready}
            missing = [rank for rank in missing if rank not in answers]
        return answers

    def _answer(self, rank: int) -> dict[str, Any]:
        process = self._ranks[rank]
        message = process.line.receive()
        if message is None:
            raise StepFailed(f"the process of GPU {rank} ended: {process.describe_end()}")
        if "failed" in message:
            raise StepFailed(f"GPU {rank}: {message['failed']}")
        return message

    def close(self) -> None:
        """Lets the processes give everything back, ends them, and removes the folder. Idempotent."""
        try:
            if self._ranks:
                self._perform(Step("close", tuple(range(self._num_ranks)), limit_s=_CLOSE_LIMIT_S))
                for process in self._ranks:
                    process.hang_up()
        except StepFailed:
            pass  # they are ended below
        finally:
            self._end()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _end(self) -> None:
        for process in self._ranks:
            process.popen.kill()
        for process in self._ranks:
            process.close()
        self._ranks.clear()
        self._gate = None


class _Process:
    def __init__(self, module: str, shared_fds: list[int], rank: int, num_ranks: int) -> None:
        mine, theirs = socket.socketpair()
        life_read, self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        path: Memory | None = None
        try:
            path = search_path()
            fds = [theirs.fileno(), life_read, *shared_fds]
            self.popen = subprocess.Popen(
                [sys.executable, "-c", code_to_run(path.fd, module, fds, rank, num_ranks)],
                pass_fds=[*fds, path.fd],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # a terminal's Ctrl-C is for who started it
            )
        except BaseException:
            mine.close()
            os.close(self._lifeline)
            self._errors.close()
            raise
        finally:
            theirs.close()
            os.close(life_read)
            if path is not None:
                path.close()
        self.line = Line(mine.detach())

    def hang_up(self) -> None:
        self.line.close()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_CLOSE_LIMIT_S)

    def describe_end(self) -> str:
        """How it ended, and the last that it wrote."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_CLOSE_LIMIT_S)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return "; ".join([describe_exit(self.popen.returncode), *last])

    def close(self) -> None:
        """Waits for its end, and gives its descriptors back."""
        self.popen.wait()
        self.line.close()
        os.close(self._lifeline)
        self._errors.close()
