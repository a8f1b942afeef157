"""The parties of a group as one of them has them: names, doorbells, and the processes of the others."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping, Sequence

from crossfade.host.doorbell import Bell
from crossfade.host.processes import open_pidfd

__all__ = ["Parties"]


class Parties:
    """All parties, in the order of ranks. ``bells`` are the doorbells of all, ``pids`` the process ids of the others."""

    def __init__(self, names: Sequence[str], me: str, bells: Mapping[str, Bell], pids: Mapping[str, int]) -> None:
        self.names = tuple(names)
        self.label = ", ".join(names)
        self.own_bell = bells[me]
        self.other_bells = [bells[name] for name in names if name != me]
        self._lock = threading.Lock()  # of the descriptors
        self._pidfds: dict[int, str] = {}
        self._poller = select.poll()
        try:
            for name, pid in pids.items():
                self._pidfds[open_pidfd(pid)] = name
        except BaseException:
            self.close()
            raise
        for pidfd in self._pidfds:
            self._poller.register(pidfd, select.POLLIN)

    def dead(self, wait_s: float = 0.0) -> list[str]:
        """The parties whose process has ended; waits for the first one for up to ``wait_s``. Any thread may ask."""
        with self._lock:
            return [self._pidfds[pidfd] for pidfd, _ in self._poller.poll(1000 * wait_s)] if self._pidfds else []

    def death(self, wait_s: float = 0.0) -> str:
        """A sentence that names the dead; empty if there are none.

        The system knows of a death before this party does: others that heard of it first may have left because of it.
        """
        dead = self.dead(wait_s)
        return f"the process of {' and '.join(dead)} is gone" if dead else ""

    def close(self) -> None:
        """Closes the descriptors: afterwards no party is known to be dead. Idempotent."""
        with self._lock:
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._pidfds = {}
