"""Watching processes die, and saying how they did."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress

KILLED = "it was killed"

_EXITING = 0x4  # PF_EXITING among the flags in /proc/PID/stat


def open_pidfd(pid: int, undo: ExitStack | None = None) -> int:
    """A descriptor that is readable once process ``pid`` has ended. ``undo`` closes it."""
    pidfd = os.pidfd_open(pid)
    if undo is not None:
        undo.callback(os.close, pidfd)
    return pidfd


class Alive:
    """Asks the system which of some processes are dead, by the names of their parties. Any thread may ask.

    It copies the pidfds: the caller may close its own at any time, and a number that is used again would hide a death.
    """

    def __init__(self, pidfds: Mapping[str, int]) -> None:
        self._parties: dict[int, str] = {os.dup(pidfd): party for party, pidfd in pidfds.items()}
        poller = select.poll()
        for own in self._parties:
            poller.register(own, select.POLLIN)
        self._poll = poller.poll
        self._lock = threading.Lock()  # a poll object is one thread's at a time

    def check(self, wait_s: float = 0.0) -> list[str]:
        """Who is dead; nobody, as a rule. One system call, which waits for the first death for up to ``wait_s``; none where nobody
        is asked about.
        """
        if not self._parties:
            return []
        with self._lock:
            parties = self._parties  # none if it was closed meanwhile: then the descriptors are others'
            ended = self._poll(1000 * wait_s) if parties else []
        return sorted(parties[fd] for fd, _ in ended) if ended else []

    def close(self) -> None:
        """Nobody is asked about any more. Idempotent."""
        with self._lock:
            parties, self._parties = self._parties, {}
        for own in parties:
            os.close(own)


def await_end(pidfd: int, timeout_s: float | None) -> bool:
    """Waits for the end of the process behind ``pidfd``; False if the time passed, None for ever."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def is_ending(pid: int) -> bool:
    """Whether process ``pid`` is on its way out, or has ended.

    Others may notice by its files, which are gone soon after this is so. Its pidfd tells once its memory is given back too: tens of
    milliseconds later where there are gigabytes, and more where there are devices.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *words = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no descriptor left, say: nothing is known
        return False
    return state in "ZX" or bool(int(words[5]) & _EXITING)


def describe_exit(code: int | None) -> str:
    """Returns an exit status, as ``subprocess`` has it, in words: negative numbers are signals; None is a lost status."""
    if code is None:
        return f"it ended (how is not known: {_why_unknown()})"
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


def _why_unknown() -> str:
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        return "this program ignores SIGCHLD, so the system keeps no exit status of its children"
    return "somebody else has collected its exit status, by os.waitpid(-1, ...), say"


def die_on_hangup(fd: int) -> None:
    """Has the kernel kill this process when the other end of the pipe ``fd`` closes, whatever this process is doing then.

    Nothing may ever be written to that pipe. It works where no thread can: in a long call that holds the interpreter lock, and
    in a stopped process. (``PR_SET_PDEATHSIG`` would fire when the *thread* that started us ends.)
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def count_oom_kills() -> int:
    """How many processes the kernel has ended since the system started because memory ran out; 0 if it does not say."""
    with suppress(OSError), open("/proc/vmstat") as file:
        for line in file:
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
