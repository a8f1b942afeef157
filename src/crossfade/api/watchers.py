"""Threads and event loops that wait for what another thread does: each looks again when that one has taken results in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchers:
    """The waits that ``nudge`` has to wake. ``is_missed``: one of them found a lock taken, and has to look again."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        self.waiting: set[object] = set()
        self.is_missed = False
        self._nudge = nudge

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is entered, the caller waits: a thread that takes results in wakes it."""
        wait = object()
        try:
            self.waiting.add(wait)
            yield
        finally:
            self.waiting.discard(wait)
            if self.waiting:  # another one may have looked while this one took results in
                self._nudge()

    def try_lock(self, lock: threading.RLock) -> bool:
        """Takes the lock, or leaves a note for its holder that the caller has to look again (see `notify_missed`).

        The second attempt comes after the note: if that fails too, the holder releases the lock, and reads the note, later.
        """
        if lock.acquire(False):
            return True
        self.is_missed = True
        return lock.acquire(False)

    def notify_missed(self) -> None:
        """Wakes the waits that found a lock taken, which was just released: what they were woken for may still be there."""
        if self.is_missed:
            self.is_missed = False
            if self.waiting:
                self._nudge()
