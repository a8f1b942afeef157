"""Asking the system who is alive, before a value that came over device edges is given to a host.

A peer that has died leaves streams waiting. Its neighbours' watchdogs let them go, and what these streams then send to others is
rubbish that looks right. A neighbour releases them only after it saw the death in the descriptor of the dead process, and that is
the system's word, the same for all. So a party that looks at the descriptors of all parties upstream (`crossfade.plan.upstream`)
*after* its value has come, and *before* it publishes it, finds a death that can have spoilt the value.

The order matters: a look before the value has come proves nothing.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

__all__ = ["Alive"]


class Alive:
    """Parties whose deaths would spoil a value. Any thread may ask.

    It copies the pidfds: the caller may close its own at any time, and a number that is used again would hide a death.
    """

    def __init__(self, pidfds: Mapping[str, int]) -> None:
        self._parties: dict[int, str] = {os.dup(pidfd): party for party, pidfd in pidfds.items()}
        poller = select.poll()
        for own in self._parties:
            poller.register(own, select.POLLIN)
        self._poll = poller.poll
        self._lock = threading.Lock()  # a poll object is one thread's at a time

    def check(self) -> list[str]:
        """Who is dead, by name; nobody, as a rule. One system call, which waits for nothing; none where nobody is asked about."""
        if not self._parties:
            return []
        with self._lock:
            parties = self._parties  # none if it was closed meanwhile: then the descriptors are others'
            ended = self._poll(0) if parties else []
        return sorted(parties[fd] for fd, _ in ended) if ended else []

    def close(self) -> None:
        """Nobody is asked about any more. Idempotent."""
        with self._lock:
            parties, self._parties = self._parties, {}
        for own in parties:
            os.close(own)
