"""Limits that the system sets for a process: the number of descriptors (ulimit -n), and the size of files (ulimit -f).

Gives the words for an error about a limit, and keeps a reserve of descriptors for those that are sent to this process.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MET = {
    errno.EMFILE: ", the process has no descriptor left",
    errno.ENFILE: ", the system has no descriptor left",
    errno.ETOOMANYREFS: ", too many descriptors are on their way to processes that have not taken them",
    errno.EFBIG: "",  # `host.memory` words this one
}

_HINTS = {
    errno.EMFILE: (
        "an actor takes about ten descriptors of its driver, a graph a few: raise the limit (ulimit -n), tear graphs down, kill "
        "actors, or close files"
    ),
    errno.ENFILE: "end what holds many files open",
    errno.ETOOMANYREFS: "let busy actors finish, or raise the limit of descriptors (ulimit -n)",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
}

_RESERVE = 64
"""The number of reserved descriptors; at most an eighth of the limit."""


def limit_met(error: BaseException) -> tuple[str, str] | None:
    """Returns which limit an error says was met, and what to do about it. None for an error of another kind."""
    if not isinstance(error, OSError) or error.errno not in _MET:
        return None
    return f"{error.strerror}{_MET[error.errno]}", _HINTS[error.errno]


def allow_many_descriptors() -> None:
    """Raises the limit of open descriptors to the hard limit: each peer takes three descriptors, each plan one per heap."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        _set_limit(hard, hard)


def reserve_descriptors() -> None:
    """Lowers the limit of open descriptors below the hard limit: the system silently drops descriptors that are sent to a process
    without room for them, and the reserve keeps room.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set_limit(hard - max(0, min(_RESERVE, hard // 8)), hard)


@contextmanager
def with_reserve() -> Iterator[int]:
    """A context manager in which the reserve may be used, for receiving. Yields the first descriptor number of the reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set_limit(hard, hard)
    try:
        yield soft
    finally:
        _set_limit(soft, hard)


def _set_limit(soft: int, hard: int) -> None:
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
