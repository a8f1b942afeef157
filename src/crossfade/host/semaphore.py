"""POSIX semaphores that lie in shared memory, at the speed of ``multiprocessing``'s.

``sem_init`` puts one anywhere in a shared mapping; the interpreter's own semaphore type (``_multiprocessing.SemLock``)
can be pointed at it, so trying, taking and posting cost 15 to 30 ns with no name in /dev/shm. (ctypes calls would cost
ten times that, so they are used for set-up only.)

Why counting semaphores and not plain words: a pure Python program has no memory fences, but ``sem_post`` releases and
a successful ``sem_trywait`` acquires. What was written before the post is therefore seen after the take, also on
aarch64, where plain stores have no order.
"""

from __future__ import annotations

import mmap
import platform
from _multiprocessing import SemLock  # type: ignore[import-not-found]
from functools import cache
from typing import Final, Protocol, cast

from crossfade.host.memory import PAGE_BYTES, address_of, libc, libc_error

SEMAPHORE_BYTES: Final = 32
"""sizeof(sem_t) of glibc and musl on 64-bit Linux."""

FENCE_AFTER_POST: Final = platform.machine() not in ("x86_64", "AMD64")
"""Whether a load after a post may be seen before it. On x86 the post is a locked instruction, which is a full fence."""

_COUNTING = 1  # SemLock's kind for a counting semaphore
_MAX_VALUE = 2**31 - 1


class Semaphore(Protocol):
    """What the interpreter's semaphore offers of use here."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Takes one; False when there is none and ``block`` is false, or the time is up."""

    def release(self) -> None:
        """Posts one."""

    def _is_zero(self) -> bool:
        """Whether there is none to take; takes nothing."""

    def _get_value(self) -> int:
        """How many there are to take; takes nothing."""


def init_semaphore(address: int, value: int) -> None:
    """Makes the 32 bytes at ``address`` a semaphore that processes share, with ``value`` posts in it."""
    if libc().sem_init(address, 1, value) != 0:
        raise libc_error()


def open_semaphore(address: int) -> Semaphore:
    """The semaphore at ``address``. The caller keeps the mapping alive as long as it uses the result.

    (When the object dies it calls ``sem_close``, which glibc answers with EINVAL for a semaphore it did not open by name.)
    """
    return cast(Semaphore, SemLock._rebuild(address, _COUNTING, _MAX_VALUE, None))


class _Fence:
    """A full memory fence made of a private semaphore: a release, then an acquire, which no processor swaps."""

    def __init__(self) -> None:
        self._mapping = mmap.mmap(-1, PAGE_BYTES)
        init_semaphore(address_of(self._mapping), 0)
        semaphore = open_semaphore(address_of(self._mapping))
        self._post, self._take = semaphore.release, semaphore.acquire

    def __call__(self) -> None:
        self._post()
        self._take(False)


@cache
def full_fence() -> _Fence:
    """The process's fence: call the result (30 ns)."""
    return _Fence()
