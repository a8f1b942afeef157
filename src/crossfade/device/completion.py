"""Marks one user's last operation on shared streams, and tells when it has completed.

A device has few streams, so those who share one must be able to end while the others continue.
"""

from __future__ import annotations

from collections.abc import Iterable

from crossfade.device.driver import Driver


class CompletionMark:
    """The last operation that one user gave each of its streams, which others may use as well."""

    def __init__(self, driver: Driver, streams: Iterable[int]) -> None:
        self._driver = driver
        self._streams = tuple(dict.fromkeys(streams))
        self._events: list[int] = []
        self.is_longer = False  # set by the user behind each operation that it has enqueued

    def has_passed(self) -> bool:
        """Whether the device has done all of it. Ask again where it has not."""
        if all(map(self._driver.is_idle, self._streams)):
            self.is_longer = False  # what others enqueue from now on is none of it
            return True
        if self.is_longer:
            self.is_longer = False
            while len(self._events) < len(self._streams):
                self._events.append(self._driver.create_event())
            for event, stream in zip(self._events, self._streams, strict=True):
                self._driver.record_event(event, stream)
        return all(map(self._driver.has_happened, self._events))

    def close(self) -> None:
        """Gives its events back. Idempotent."""
        while self._events:
            self._driver.destroy_event(self._events.pop())
