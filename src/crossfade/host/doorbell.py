"""Doorbells: how a process waits for everything at once, and how others wake it.

A process has one `Doorbell`. A process that posts something for it (a value, a free slot) looks at one byte, *asleep*, and
rings only when it is set; so nothing but that look is spent while the process is awake. Ringing writes an eventfd, on
which the process sleeps together with its sockets and the descriptors of the processes that it watches. An idle
process uses no CPU, and an event loop can wait for the doorbell's descriptor like for any other.

No wake-up is lost. The sleeper: (1) sets *asleep*, (2) full fence, (3) looks once more, (4) sleeps. The other side:
(a) posts, (b) full fence (on x86 the post is one), (c) looks at *asleep*, (d) rings. If (3) misses the post then (a) comes
after (3), so (c) comes after (1) and rings; the eventfd remembers the ring if it comes before (4).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from crossfade.errors import SessionError
from crossfade.host.memory import PAGE_BYTES, Memory
from crossfade.host.semaphore import full_fence
from crossfade.interrupted import heard_sleep, longest_sleep, pause

DEFAULT_SPIN_US = 150.0
"""The other side may copy 2 MB meanwhile (docs/decisions/0003)."""

DEVICE_SPIN_US = 300.0
"""Where devices take part, values take longer: their hosts spend tens of microseconds on each, and a sleeper that long to wake."""

_yield_core: Final = os.sched_yield
_LONGEST_S = (
    1e6  # of a single sleep, eleven days: the system takes none that is much longer, and who sleeps looks again anyway
)
_FEW_POLLS: Final = 2  # longer would keep others, who share the core, from making it true
_MANY_POLLS: Final = 200  # some ten microseconds: who yields answers later, so that the other side comes to yield too
_YIELDS_PER_LOOK: Final = 16  # at the clock
_ASLEEP: Final = 0
_MAIL: Final = 1


class Bell:
    """A process's doorbell as others hold it."""

    def __init__(self, memory: Memory, event_fd: int) -> None:
        # byte 0 is set while the process sleeps, byte 1 while a message waits in its control socket.
        self.flags = memoryview(memory.map(PAGE_BYTES))
        memory.close()
        self.event_fd = event_fd

    @classmethod
    def of(cls, memory_fd: int, event_fd: int) -> Bell:
        """Makes a bell from a doorbell's descriptors, which it duplicates."""
        memory = Memory(os.dup(memory_fd))
        try:
            return cls(memory, os.dup(event_fd))
        except BaseException:
            memory.close()
            raise

    def ring(self) -> None:
        """Wakes the process."""
        if self.event_fd >= 0:  # closed once the process is gone; channels to it may still be closed after that
            os.eventfd_write(self.event_fd, 1)

    def ring_if_asleep(self) -> None:
        """Wakes the process if it sleeps. What was posted before must be fenced (see the module's text)."""
        if self.flags[_ASLEEP]:
            self.ring()

    def announce_mail(self) -> None:
        """Makes a busy process look into its control socket (a sleeping one is woken by the socket itself)."""
        self.flags[_MAIL] = 1

    def close(self) -> None:
        """Gives the descriptor back."""
        fd, self.event_fd = (
            self.event_fd,
            -1,
        )  # before closing: an error in between must not lead to closing twice
        if fd >= 0:
            os.close(fd)
            self.flags = memoryview(bytearray(2))  # releases the mapping


class Doorbell:
    """The doorbell of this process. It owns the descriptors, which `create_fds` made.

    Before it sleeps it looks for work for ``spin_us``, yielding the core in between. Several threads may wait: one of them sleeps
    on the descriptors, the others on a condition that it notifies. The descriptors live until the last thread that uses them has
    left, so any thread may close the doorbell, also in a signal's handler.
    """

    def __init__(self, memory_fd: int, event_fd: int, *, spin_us: float = DEFAULT_SPIN_US) -> None:
        self._mapping = Memory(memory_fd).map(PAGE_BYTES)
        self.memory_fd = memory_fd
        self.event_fd = event_fd
        self.flags = memoryview(self._mapping)
        self.spin_us = spin_us
        self._num_cores = len(os.sched_getaffinity(0))
        self._fence = full_fence()
        self._watched = select.epoll()  # the descriptors that have handlers
        self._handlers: dict[int, Callable[[], None]] = {}
        self._lock = threading.RLock()  # reentrant: a signal's handler may come while its own thread holds it
        self._turn = threading.Condition(self._lock)
        self._sleeper = 0  # the thread that sleeps on the descriptors
        self._waiting: set[int] = set()  # threads
        self._num_beside = 0  # threads that sleep until that one wakes
        self._num_wakes = 0  # of the sleeper, and nudges
        self._num_loops = 0  # event loops that sleep on pollers of their own
        self._num_users = 0  # of the descriptors, now
        self._is_closing = False
        try:
            self._poller = self.new_poller()
        except BaseException:
            self._watched.close()
            raise

    @staticmethod
    def create_fds(label: str) -> tuple[int, int]:
        """The two descriptors of a new doorbell: its memory and its eventfd."""
        memory = Memory.create(f"bell-{label}", PAGE_BYTES)
        try:
            return memory.fd, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            memory.close()
            raise

    def bell(self) -> Bell:
        """This doorbell as others hold it, for use by threads of this process."""
        return Bell.of(self.memory_fd, self.event_fd)

    # These take no lock. Their callers hold locks of their own, for which a signal's handler may wait that came while its thread
    # held this one.

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Calls ``handler`` (which must not block or raise) in a waiting thread when ``fd`` is readable or hung up."""
        if self._is_closing:
            raise _closed()
        try:
            self._watched.register(fd, select.EPOLLIN)
        except ValueError:  # the last user has left just now
            raise _closed() from None
        self._handlers[fd] = handler

    def watch_room(self, fd: int, *, is_wanted: bool) -> None:
        """Starts, or with ``is_wanted`` False stops, to call the handler of the watched ``fd`` also when it can be written to."""
        if fd in self._handlers and not self._is_closing:
            with suppress(OSError, ValueError):  # another thread has taken it out just now, or all are closed
                self._watched.modify(fd, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def unwatch(self, fd: int) -> None:
        """Undoes `watch`."""
        if self._handlers.pop(fd, None) is not None:
            # Another thread may just have closed it, which takes it out, or all of them.
            with suppress(OSError, ValueError):
                self._watched.unregister(fd)

    def take_mail_flag(self) -> bool:
        """Whether a message was announced since the last call."""
        if self.flags[_MAIL]:
            self.flags[_MAIL] = 0
            return True
        return False

    def new_poller(self) -> select.epoll:
        """An epoll that is readable when this process is rung, or when a watched descriptor is ready.

        Each sleeper has one of its own, so that none takes a ring away from another. The rings are edge-triggered: each wakes once,
        also when the count before it was never read.
        """
        with self._lock:
            if self._is_closing:
                raise _closed()
            poller = select.epoll()
            poller.register(self.event_fd, select.EPOLLIN | select.EPOLLET)
            poller.register(self._watched.fileno(), select.EPOLLIN)
            return poller

    def enter_loop(self) -> None:
        """An event loop is going to sleep on a poller of its own, and is rung from now on. It has to look once more first."""
        with self._lock:
            self._num_loops += 1
            self.flags[_ASLEEP] = 1
        self._fence()

    def leave_loop(self) -> None:
        """Undoes `enter_loop`."""
        with self._lock:
            self._num_loops -= 1
            self.flags[_ASLEEP] = bool(self._sleeper or self._num_loops)

    def pump(self) -> None:
        """Calls the handlers of the descriptors that are ready, without waiting. Does nothing once the doorbell is closed."""
        with self._lock:
            if self._is_closing:
                return
            self._num_users += 1
        has_handled = False
        try:
            for fd, _ in self._watched.poll(0):
                if handler := self._handlers.get(fd):
                    has_handled = True
                    handler()
        finally:
            self._leave()
        if has_handled:  # others may have looked before the handlers ran
            self.nudge()

    def wait_until(
        self,
        ready: Callable[[], object],
        timeout_s: float | None = None,
        idle: Callable[[], bool] | None = None,
        num_parties: int = 0,
        spin_us: float = 0.0,
    ) -> bool:
        """Waits until ``ready()``, which may do the work that it finds, is true: a short spin, then asleep. False if the time
        passed.

        While it spins it calls ``idle``, a cheap check, instead of ``ready()``. That may be true though ``ready()`` would be, which
        is found out before sleeping. Where each of ``num_parties`` processes can have a core, the first microseconds are spent
        without yielding. ``spin_us`` is the shortest time to spin, if this doorbell spins at all. Raises a `SessionError` once the
        doorbell is closed.
        """
        if self._spin(ready, idle, num_parties, spin_us):
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        me = threading.get_ident()
        if me in self._waiting:
            return self._wait_within(ready, deadline)
        try:
            self._waiting.add(me)
            while not self._sleep(ready, deadline):
                if ready():
                    return True
                if deadline is not None and time.monotonic() >= deadline:
                    return False
            return True
        finally:
            self._waiting.discard(me)

    def _wait_within(self, ready: Callable[[], object], deadline: float | None) -> bool:
        """Waits in a signal's handler, which has come while its thread was waiting here: as an event loop does, so that it takes
        no wake-up away from the thread. That looks again afterwards, for what it waits for may have been done here.
        """
        if ready():
            return True
        with ExitStack() as undo:
            with self._lock:
                poller = undo.enter_context(self.new_poller())
                self._num_users += 1
                undo.callback(self._leave)
            undo.callback(self.nudge)
            self.enter_loop()
            undo.callback(self.leave_loop)
            while not ready():
                left_s = _left_s(deadline)
                if left_s == 0:
                    return False
                if self._is_closing:
                    raise _closed()
                events = pause(poller.poll, left_s)
                with self._lock:  # the thread that this one has come in stands still, and wakes nobody
                    self._num_wakes += 1
                    self._turn.notify_all()
                if any(fd != self.event_fd for fd, _ in events):
                    self.pump()
            return True

    def _spin(
        self, ready: Callable[[], object], idle: Callable[[], bool] | None, num_parties: int, spin_us: float
    ) -> bool:
        """Looks, then yields the core and looks, until ``ready()`` is true or the spin time is over."""
        if not self.spin_us:
            return False
        num_polls = _MANY_POLLS if idle is not None and 0 < num_parties <= self._num_cores else _FEW_POLLS
        is_idle = _never if idle is None else idle
        for _ in range(num_polls):
            if not is_idle() and ready():
                return True
        # For a time, not for a number of yields: where others compute on this core, each takes milliseconds.
        end_ns = 0
        while True:
            for _ in range(_YIELDS_PER_LOOK):
                _yield_core()
                if not is_idle() and ready():
                    return True
            now_ns = time.monotonic_ns()
            if not end_ns:
                end_ns = now_ns + round(max(self.spin_us, spin_us) * 1e3)
            elif now_ns >= end_ns:
                return False

    def _sleep(self, ready: Callable[[], object], deadline: float | None) -> bool:
        """One sleep: True if ``ready()`` was true before it."""
        left_s = _left_s(deadline)
        me = threading.get_ident()
        with self._lock:
            is_closing = self._is_closing
            # An interrupt may have kept this thread from leaving: it may come again.
            is_mine = self._sleeper in (0, me) and not is_closing
            if is_mine:
                self._num_users += self._sleeper != me
                self._sleeper = me
                self.flags[_ASLEEP] = 1  # before anybody else can find out that there is a sleeper, and rely on it
        if is_closing:
            if ready():
                return True
            raise _closed()
        if not is_mine:
            return self._sleep_beside(ready, left_s)
        try:
            self._fence()
            if ready():  # not a cheap look: a signal's handler may have done here, in this thread, what is waited for
                return True
            events = pause(self._poller.poll, heard_sleep(left_s))
        finally:
            with self._lock:
                self._sleeper = 0
                self._num_wakes += 1
                self.flags[_ASLEEP] = self._num_loops > 0
                if self._num_beside:
                    self._turn.notify_all()
                self._leave()
        if any(fd != self.event_fd for fd, _ in events):
            self.pump()
        return False

    def _sleep_beside(self, ready: Callable[[], object], left_s: float | None) -> bool:
        """Sleeps until the thread that sleeps on the descriptors has woken, or a thread nudges."""
        with self._lock:
            self._num_beside += 1
            num_wakes = self._num_wakes
        try:
            self._fence()
            if ready():  # not with the lock: what is found out here may have to be told, by a nudge
                return True
            with self._lock:
                if self._sleeper and self._num_wakes == num_wakes and not self._is_closing:
                    self._turn.wait(longest_sleep(left_s))
            return False
        finally:
            with self._lock:
                self._num_beside -= 1

    def nudge(self) -> None:
        """Makes the threads that wait look again: something that they may wait for was found out by this one."""
        with self._lock:
            if self.event_fd >= 0:
                os.eventfd_write(self.event_fd, 1)
            self._num_wakes += 1
            self._turn.notify_all()

    def close(self) -> None:
        """Gives all descriptors back, or leaves that to the threads that still use them, and wakes those.

        Waiting is over for all of them: a thread without a reason of its own to return gets a `SessionError`.
        """
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._num_users += 1
            self.nudge()
            self._leave()

    def _leave(self) -> None:
        """The calling thread uses the descriptors no more."""
        with self._lock:
            self._num_users -= 1
            if self._is_closing and not self._num_users:
                self._poller.close()
                self._watched.close()
                fds, self.event_fd, self.memory_fd = (self.event_fd, self.memory_fd), -1, -1
                for fd in fds:
                    if fd >= 0:
                        os.close(fd)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else min(max(0.0, deadline - time.monotonic()), _LONGEST_S)


def _closed() -> SessionError:
    return SessionError("the session was shut down", hint="make actors and graphs anew after crossfade.shutdown()")


def _never() -> bool:
    return False
