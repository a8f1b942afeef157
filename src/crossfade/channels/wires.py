"""The thread that looks after a party's wires while the party does not.

It sleeps on the connections. When one wakes it and the party sleeps, or has looked within the last moments, it leaves that to the
party, and looks again later: the later, the longer the party has looked by itself.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence

from crossfade.channels.wire import Wire
from crossfade.host.doorbell import Bell
from crossfade.host.semaphore import full_fence

_PATIENCE_MS, _MOST_PATIENCE_MS, _MOST_FOR_OTHERS_MS = 1, 64, 4
"""How long it leaves a connection to the party, twice as long each time: once woken it takes the interpreter from the party, and
until it has that, each of the party's system calls wakes it again. Less long where others on this host wait for what comes.
"""


def longer_patience_ms(patience_ms: int, *, are_for_others: bool) -> int:
    """How long connections are left to the party that has attended to them for so long already."""
    return min(2 * patience_ms, _MOST_FOR_OTHERS_MS if are_for_others else _MOST_PATIENCE_MS)


class Wires:
    """All wires of one party of a plan, and the thread that looks after them while the party does not."""

    def __init__(self, bell: Bell, wires: Sequence[Wire]) -> None:
        self.all = list(wires)
        self._bell = bell
        self._fence = full_fence()
        self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._look_after, name="crossfade-wires", daemon=True)
        for wire in self.all:
            wire.wants_room = self._wake  # a wire that connects just now may call it at once
        self._thread.start()

    def _wake(self) -> None:
        if threading.current_thread() is not self._thread:
            os.eventfd_write(self._wake_fd, 1)

    def attend(self) -> bool:
        """Moves what can be moved now, in the party's thread. Returns whether that was anything."""
        return any([wire.attend() for wire in self.all])

    def _look_after(self) -> None:
        poller, pause = select.poll(), select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        pause.register(self._wake_fd, select.POLLIN)  # which ends it: something is to be sent, or this is closed
        watched: dict[int, tuple[Wire, int]] = {}
        patience_ms = _PATIENCE_MS
        while not self._is_closed:
            for wire in self.all:
                wanted = (
                    0 if wire.fault or wire.fileno() < 0 else select.POLLIN | (select.POLLOUT if wire.has_unsent else 0)
                )
                fd = wire.fileno()
                known = watched.get(fd, (wire, 0))[1]
                if wanted and wanted != known:
                    poller.register(fd, wanted)
                    watched[fd] = wire, wanted
                elif not wanted and known:
                    poller.unregister(fd)
                    del watched[fd]
            ready = {fd for fd, _ in poller.poll()}
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            ours = [watched[fd][0] for fd in ready if fd in watched]
            if ours and all(wire.is_attended and not wire.has_unsent for wire in ours):
                pause.poll(patience_ms)  # the party does it
                patience_ms = longer_patience_ms(
                    patience_ms, are_for_others=any(wire.lands_for_others for wire in ours)
                )
                continue
            patience_ms = _PATIENCE_MS
            if any([wire.pump() for wire in ours]):
                self._fence()
                self._bell.ring_if_asleep()
            elif ours:
                pause.poll(_PATIENCE_MS)  # another thread is at it

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            for wire in self.all:
                wire.close()
            os.close(self._wake_fd)
