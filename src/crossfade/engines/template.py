"""The process that actors are forked from where a session preloads modules: it has imported them, and runs one thread.

The driver asks for each actor over a socket. With its request come one end of a socket for this actor alone, the stdout and stderr
of the actor, and the descriptors that it is to have. Over the actor's socket this process tells the actor's pid, or why there is
none, and later its exit status. The actor stays a zombie until the driver shuts that socket down, so that its pid is nobody
else's; if it still runs then, it is killed. This process ends with the driver, however that ends and whatever this process is doing
then, or with its last actor once the driver asks for no more.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from crossfade.engines import serving
from crossfade.host.processes import await_end, die_on_hangup
from crossfade.host.sockets import descriptors

_Request: TypeAlias = tuple[float, dict[str, str | None]]
"""How long an actor spins, in microseconds, and variables of its environment that this process may have otherwise: None for one
that it is not to have.
"""

_NUM_FDS = 11
"""Of a request: the actor's socket, its stdout and stderr, and the descriptors that `serving.serve` takes."""

_MAX_BYTES = 1 << 16  # of a message

_MAX_CHARS = 4096  # of why no actor can be forked, which is an error's text

_INSTEAD = "leave it out of preload: actors import it when they need it"
_GPUS = "/dev/nvidia"


def main(requests_fd: int, driver_pidfd: int, lifeline_fd: int, *modules: str) -> None:
    """Imports the modules, forks actors, and serves as each of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit statuses are lost
    for fd in (requests_fd, driver_pidfd, lifeline_fd):
        os.set_inheritable(fd, False)
    die_on_hangup(lifeline_fd)
    if await_end(driver_pidfd, 0.0):  # it has hung up before
        os._exit(0)
    why, hint = _preload(modules)
    if len(why) > _MAX_CHARS:
        why = f"{why[:_MAX_CHARS]}..."
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whatever a module has set
    gc.collect()
    gc.freeze()  # an actor that looks for garbage would copy the memory that it shares
    requests = socket.socket(fileno=requests_fd)
    spin_us, fds = _Template(requests, driver_pidfd, lifeline_fd, (why, hint)).serve()
    signal.signal(signal.SIGCHLD, on_child)
    importlib.invalidate_caches()
    _seed()
    serving.exit_with(serving.serve(fds, spin_us))


def _preload(modules: Sequence[str]) -> tuple[str, str]:
    """Imports modules. Returns why no actor can be forked now, and what to do about it; both empty if one can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{module} cannot be preloaded: {error}", "preload takes names of modules that actors can import"
        except BaseException as error:
            traceback.print_exc()
            return f"{module} cannot be preloaded: its import raised {type(error).__name__}: {error}", _INSTEAD
        if _num_threads() > 1 and (num_threads := _num_threads_at_fork()) > 1:
            return (
                f"{module} cannot be preloaded: its import started {num_threads - 1} threads, which no actor would have",
                _INSTEAD,
            )
        if _has_gpus():
            return f"{module} cannot be preloaded: its import opened a GPU, which no actor could use", _INSTEAD
    return "", ""


def _seed() -> None:
    """Random numbers that no other actor has, where a new interpreter would have such. The module ``random`` does so by itself."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _num_threads_at_fork() -> int:
    """Some libraries, numpy's OpenBLAS for one, end their threads before a fork, and start them again on both sides when needed."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    num_threads = _num_threads()
    os.waitpid(pid, 0)
    return num_threads


def _has_gpus() -> bool:
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of this listing
            if os.readlink(f"/proc/self/fd/{fd}").startswith(_GPUS):
                return True
    return False


@dataclass(frozen=True, slots=True)
class _Actor:
    pid: int
    pidfd: int
    driver: socket.socket

    def tell_status(self) -> None:
        """Once it has ended."""
        with suppress(ChildProcessError):  # a module reaps
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert status is not None, "it has ended"
            _tell(self.driver, status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)

    def bury(self) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        os.close(self.pidfd)
        self.driver.close()


class _Template:
    """``refusal``: why no actor is forked, and what to do about it, or two empty texts."""

    def __init__(self, requests: socket.socket, driver_pidfd: int, lifeline_fd: int, refusal: tuple[str, str]) -> None:
        self._requests = requests
        self._driver_pidfd = driver_pidfd
        self._lifeline_fd = lifeline_fd
        self._refusal = refusal
        self._is_wanted = True
        self._actors: dict[int, _Actor] = {}  # by each of two descriptors: of the process, and of the driver's socket
        self._poller = select.poll()
        for fd in (driver_pidfd, requests.fileno()):
            self._poller.register(fd, select.POLLIN)

    def serve(self) -> tuple[float, list[int]]:
        """Serves the driver until the end of this process. Returns in actors: how long each spins, and its descriptors."""
        while self._is_wanted or self._actors:
            fd, _ = self._poller.poll()[0]  # one at a time: what is done about it may close others
            if fd == self._driver_pidfd:
                break
            if fd == self._requests.fileno():
                if (actor := self._take_request()) is not None:
                    return actor
            elif fd == self._actors[fd].pidfd:
                self._poller.unregister(fd)
                self._actors[fd].tell_status()
            else:
                self._forget(self._actors[fd])
        os._exit(0)

    def _take_request(self) -> tuple[float, list[int]] | None:
        room = socket.CMSG_SPACE(4 * _NUM_FDS)
        data, ancillary, _, _ = self._requests.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        fds = descriptors(ancillary)
        if not data:
            self._is_wanted = False
            self._poller.unregister(self._requests)
        if len(fds) < _NUM_FDS:  # none, or there was no room for them here: the driver sees the actor's socket closed
            for fd in fds:
                os.close(fd)
            return None
        pid, refusal = -1, self._refusal
        if not refusal[0]:
            try:
                pid = os.fork()
            except OSError as error:
                refusal = str(error), ""
        if pid == 0:
            return self._become(marshal.loads(data), *fds)
        for fd in fds[1:]:
            os.close(fd)
        self._take_on(pid, socket.socket(fileno=fds[0]), refusal)
        return None

    def _become(
        self, request: _Request, driver_fd: int, stdout: int, stderr: int, *fds: int
    ) -> tuple[float, list[int]]:
        """In an actor: it keeps nothing of this process's."""
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd in (driver_fd, stdout, stderr, self._driver_pidfd, self._lifeline_fd):
            os.close(fd)
        self._requests.close()
        for actor in set(self._actors.values()):
            actor.close()
        spin_us, environment = request
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        return spin_us, list(fds)

    def _take_on(self, pid: int, driver: socket.socket, refusal: tuple[str, str]) -> None:
        pidfd = -1
        if pid > 0:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as error:  # there is no descriptor left
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pid, refusal = -1, (str(error), "")
        _tell(driver, (pid, *refusal))
        if pid < 0:
            driver.close()
            return
        actor = _Actor(pid, pidfd, driver)
        for fd in (actor.pidfd, driver.fileno()):
            self._actors[fd] = actor
            self._poller.register(fd, select.POLLIN)

    def _forget(self, actor: _Actor) -> None:
        for fd in (actor.pidfd, actor.driver.fileno()):
            del self._actors[fd]
            with suppress(KeyError):  # it has ended before
                self._poller.unregister(fd)
        actor.bury()


def _tell(driver: socket.socket, message: tuple[int, str, str] | int) -> None:
    with suppress(ConnectionError):  # the driver does not want to know
        driver.send(marshal.dumps(message))
