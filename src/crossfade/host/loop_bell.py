"""A doorbell as an event loop waits for it: through a descriptor among the loop's own."""

from __future__ import annotations

from crossfade.host.doorbell import Doorbell


class LoopBell:
    """One event loop's side of a process's doorbell. It belongs to the loop's thread.

    While it is armed others ring (which costs them a system call for each value), so it is armed only while a task waits.
    """

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._poller = doorbell.new_poller()
        self._is_armed = False

    def fileno(self) -> int:
        """The descriptor that the loop has to watch for reading."""
        return self._poller.fileno()

    def arm(self) -> None:
        """The loop is going to sleep: look once more after this."""
        if not self._is_armed:
            self._is_armed = True
            self._doorbell.enter_loop()

    def disarm(self) -> None:
        """Nobody waits any more."""
        if self._is_armed:
            self._is_armed = False
            self._doorbell.leave_loop()

    def take(self) -> None:
        """The descriptor was readable: sees to what came, so that it is not any more."""
        if any(fd != self._doorbell.event_fd for fd, _ in self._poller.poll(0)):
            self._doorbell.pump()

    def close(self) -> None:
        """Gives the descriptor back."""
        self.disarm()
        self._poller.close()
