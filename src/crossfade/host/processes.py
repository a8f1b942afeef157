"""Watching processes die, and saying how they did."""

from __future__ import annotations

import os
import resource
import signal
import threading
from contextlib import suppress

__all__ = ["allow_many_descriptors", "describe_exit", "die_with", "open_pidfd"]


def open_pidfd(pid: int) -> int:
    """A descriptor that is readable once process ``pid`` has ended."""
    return os.pidfd_open(pid)


def allow_many_descriptors() -> None:
    """Raises this process's limit of open descriptors as far as it may: each peer takes three, and each plan one for each heap."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def describe_exit(code: int | None) -> str:
    """An exit status as ``subprocess`` gives it, in words: negative numbers are signals."""
    if code is None:
        return "its process is gone"
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


def die_with(pidfd: int) -> None:
    """Ends this process as soon as the process behind ``pidfd`` ends, also in the middle of a long call.

    (``PR_SET_PDEATHSIG`` would fire when the *thread* that started us ends.)
    """

    def watch() -> None:
        import select

        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="crossfade-die-with-driver", daemon=True).start()
