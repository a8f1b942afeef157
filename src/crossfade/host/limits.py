"""Limits that the system sets to a process: of descriptors (ulimit -n), and of the size of files (ulimit -f).

What is said when one is met, and a reserve for descriptors that are sent to this process.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["allow_many_descriptors", "limit_met", "reserve_descriptors", "with_reserve"]

_MET = {
    errno.EMFILE: ", the process has no descriptor left",
    errno.ENFILE: ", the system has no descriptor left",
    errno.ETOOMANYREFS: ", too many descriptors are on their way to processes that have not taken them",
    errno.EFBIG: "",  # said where memory is taken
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
"""Descriptors; at most an eighth of all."""


def limit_met(error: BaseException) -> tuple[str, str] | None:
    """Which limit an error says was met, and what to do about it. None for an error of another kind."""
    if not isinstance(error, OSError) or error.errno not in _MET:
        return None
    return f"{error.strerror}{_MET[error.errno]}", _HINTS[error.errno]


def allow_many_descriptors() -> None:
    """Raises this process's limit of open descriptors as far as it may: each peer takes three, and each plan one for each heap."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        _set_limit(hard, hard)


def reserve_descriptors() -> None:
    """Has this process's programs find none left a little before there is none: the system drops, without a word to the sender,
    descriptors that are sent to a process which has no room for them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set_limit(hard - max(0, min(_RESERVE, hard // 8)), hard)


@contextmanager
def with_reserve() -> Iterator[int]:
    """While descriptors are received: the reserve may be used. Gives the first number that belongs to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _set_limit(hard, hard)
    try:
        yield soft
    finally:
        _set_limit(soft, hard)


def _set_limit(soft: int, hard: int) -> None:
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
