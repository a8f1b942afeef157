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

_MOST_MS, _MOST_FOR_OTHERS_MS = 64, 4
"""How long the thread leaves the connections to the party at most: where others on this host read what comes, less long. A thread
that wakes asks for the interpreter, and until it has it, each system call of the party's wakes it again.
"""
_BESIDE_MS = 1
"""How long to leave a connection to another thread that is moving its bytes."""


def next_pause_ms(last_ms: int, num_received: int, most_ms: int) -> int:
    """How long to leave the connections to a party that attends to them: twice as long as the last time, where it has received
    something in each millisecond since, on average. ``last_ms`` is 0 where the party did not attend.
    """
    return min(2 * last_ms, most_ms) if 0 < last_ms <= num_received else 1


def _pump(wire: Wire) -> bool:
    """`Wire.pump`. Where that fails, as for want of memory, the wire is broken: the party hears why."""
    try:
        return wire.pump()
    except Exception as error:
        wire.break_off(f"what came could not be taken in: {type(error).__name__}: {error}")
        return True


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
        poller, pause, beside = select.poll(), select.poll(), select.poll()
        beside.register(self._wake_fd, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        # What ends a pause: something is to be sent, or can be, or this is closed.
        pause.register(self._wake_fd, select.POLLIN)
        watched: dict[int, tuple[Wire, int]] = {}
        most_ms = _MOST_FOR_OTHERS_MS if any(wire.lands_for_others for wire in self.all) else _MOST_MS
        pause_ms = num_received = 0
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
                if wanted & select.POLLOUT:
                    pause.register(fd, select.POLLOUT)
                elif known & select.POLLOUT:
                    pause.unregister(fd)
            ready = {fd for fd, _ in poller.poll()}
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            ours = [watched[fd][0] for fd in ready if fd in watched]
            if ours and all(wire.is_attended and not wire.has_unsent for wire in ours):
                before, num_received = num_received, sum(wire.num_received for wire in self.all)
                pause_ms = next_pause_ms(pause_ms, num_received - before, most_ms)
                pause.poll(pause_ms)  # the party does it
                continue
            pause_ms = 0
            if any([_pump(wire) for wire in ours]):
                self._fence()
                self._bell.ring_if_asleep()
            elif ours:
                beside.poll(_BESIDE_MS)  # another thread moves its bytes

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            for wire in self.all:
                wire.close()
            os.close(self._wake_fd)
