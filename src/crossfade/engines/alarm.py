"""An alarm clock for the loop of a process: what has to be looked at again after a time, though nobody rings."""

from __future__ import annotations

import math
import time

from crossfade.host.doorbell import Doorbell
from crossfade.host.timer import Timer


class Alarm:
    """Wakes the process that waits at its doorbell. To the microsecond, where a time limit of the wait is one of milliseconds, and
    also when it is asked for in the middle of the wait. One thread uses it.
    """

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._timer: Timer | None = None
        self._due_s = math.inf

    def wake_in(self, delay_s: float) -> None:
        """Wakes it so long from now, at the latest; it need not sleep."""
        now_s = time.monotonic()
        if now_s + delay_s < self._due_s or self._due_s <= now_s:
            if self._timer is None:
                self._timer = Timer(0)
                self._doorbell.watch(self._timer.fd, self._came)
            self._timer.start_in(delay_s * 1e6)
            self._due_s = now_s + delay_s

    def _came(self) -> None:
        if self._timer is not None:
            self._timer.wait()  # it is due: this takes the notice away
            self._due_s = math.inf
