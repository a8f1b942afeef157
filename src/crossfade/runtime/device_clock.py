"""What the host's monotonic clock said when something happened on a device.

Both clocks are read together when a graph is compiled and again when its timeline is asked for: an event is recorded on a stream
that has nothing else to do, the host notes the time before it and the time when it saw it happen. Several such brackets, moved by
the device's own account of the time between their events, overlap; the moment lies in what they have in common. Where processes
that share a GPU read at once, each bracket is as wide as the others' turns on it (0.25 and 0.4 ms with two and three of them): then
there are more, at moments drawn by chance, until one is narrow. Between the two readings the clocks are taken to go at a constant
ratio.

A device gives the time between two events as a float of 32 bits, in milliseconds, so a long time is inexact: 0.06 us at one
second, 0.25 ms at an hour. Hence events are placed one after another, each by a near one (`Trail`), the first reading last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from crossfade.device.driver import TimedDriver

NUM_TRIES = 12
WANTED_NS = 8_000
"""What a reading may be wrong by; a GPU that does nothing else allows 2 to 6 us with the first tries."""
_PATIENCE_NS = 30_000_000
"""For how long a reading that may be wrong by more is improved."""
_PAUSE_S = 0.002
"""The longest pause before a try of that kind: one takes 10 us where nobody else tries."""
_LIMIT_NS = 20_000_000
_NEAR_US = 1e6
_SHORT_US = 1e3


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment on both clocks."""

    timer: int  # an event that happened then
    host_ns: float  # what the host's clock said, in the middle of what is possible
    error_ns: float  # half of what is possible


class DeviceClock:
    """A device's clock beside the host's. Made while the device has little to do."""

    def __init__(self, driver: TimedDriver, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._driver = driver
        self._now_ns = now_ns
        self._random = Random()  # of its own: a program may have seeded the other one
        self._stream = driver.create_stream("clock")
        self._first, self._later, self._again = self._timers = [driver.create_timer() for _ in range(3)]
        self._origin = self._meet(self._first)

    def _meet(self, moment: int) -> Reading | None:
        """The moment at which this timer is recorded, now; None where the device does not come to that in time."""
        earliest, latest = float("-inf"), float("inf")
        begin_ns, num_tries = self._now_ns(), 0
        while num_tries < NUM_TRIES or (latest - earliest > 2 * WANTED_NS and self._now_ns() < begin_ns + _PATIENCE_NS):
            if num_tries >= NUM_TRIES:
                time.sleep(self._random.uniform(0, _PAUSE_S))
            timer = self._again if num_tries else moment
            bracket = self._bracket(timer)
            if bracket is None:
                break  # what is known is right, if not as narrow as it could be
            since_ns = self._driver.elapsed_us(moment, timer) * 1e3 if num_tries else 0.0
            earliest, latest = max(earliest, bracket[0] - since_ns), min(latest, bracket[1] - since_ns)
            num_tries += 1
        return Reading(moment, (earliest + latest) / 2, abs(latest - earliest) / 2) if num_tries else None

    def _bracket(self, timer: int) -> tuple[int, int] | None:
        """Records an event: the host's time before it, and when it was seen; None where it does not come in time."""
        before_ns = self._now_ns()
        self._driver.record_event(timer, self._stream)
        while not self._driver.has_happened(timer):
            if self._now_ns() > before_ns + _LIMIT_NS:
                return None
        return before_ns, self._now_ns()

    def read(self) -> Reading | None:
        """Both clocks as they are now; the first reading where the device is too busy, None where it was so then as well."""
        return self._meet(self._later) or self._origin

    def ratio(self, reading: Reading, trail: Trail) -> float:
        """The host's time for a unit of the device's, between the first reading and this one, at which the trail begins."""
        origin = self._origin
        if origin is None or origin is reading:
            return 1.0
        passed_us = -trail.place_us(origin.timer)
        return (reading.host_ns - origin.host_ns) / 1e3 / passed_us if passed_us > _SHORT_US else 1.0

    def close(self) -> None:
        """Gives the events and the stream back. Idempotent."""
        if self._timers:
            for timer in self._timers:
                self._driver.destroy_event(timer)
            self._timers.clear()
            self._driver.destroy_stream(self._stream)


class Trail:
    """Places events in the device's time, each by one that lies near. It begins at ``timer``."""

    def __init__(self, driver: TimedDriver, timer: int) -> None:
        self._driver = driver
        self._near = timer
        self._near_us = 0.0

    def place_us(self, timer: int) -> float:
        """How long after the trail's beginning the event happened. Most exact when it is asked for events in order."""
        away_us = -self._driver.elapsed_us(timer, self._near)
        place_us = self._near_us + away_us
        if abs(away_us) > _NEAR_US:
            self._near, self._near_us = timer, place_us
        return place_us
