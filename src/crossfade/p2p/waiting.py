"""How the threads of a rank wait for what other ranks' hosts do: a short spin, then asleep, with an eye on who is alive."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from crossfade.errors import ChannelClosed, ChannelTimeout
from crossfade.host.cores import Core
from crossfade.p2p.board import Alarm

_SPIN_NS = 600_000
"""How long a thread looks before its first sleep: what two copies of a megabyte and the other rank's host take."""

_REST_S = 0.005
"""How often the attendant looks whether the program still waits by itself."""

_SLICE_S = 0.2
"""The longest sleep: how soon the death of another rank is noticed."""

_DEVICE_S = 0.002
"""The longest sleep while a device is to tell that a value has come."""


class Waiting:
    """The waits of one rank. ``look`` handles what has come; ``has_more_to_come``: whether a device is to tell of more;
    ``pidfds``: of the other ranks, by rank; ``alarms``: of all ranks, by name, None for those of other hosts.
    """

    def __init__(
        self,
        alarm: Alarm,
        alarms: Mapping[str, Alarm | None],
        look: Callable[[], bool],
        has_more_to_come: Callable[[], bool],
        pidfds: Mapping[int, int],
        on_death: Callable[[int], None],
    ) -> None:
        self._own_alarm: Alarm | None = alarm  # until it is closed
        self._alarms = dict(alarms)
        self._look = look
        self._has_more_to_come = has_more_to_come
        self._on_death = on_death
        self._ranks = {pidfd: rank for rank, pidfd in pidfds.items()}
        self._poller = select.poll()
        for pidfd in self._ranks:
            self._poller.register(pidfd, select.POLLIN)
        self._burying = threading.Lock()
        self._sleeping = threading.Lock()
        self._changed = threading.Condition()
        self._core = Core()
        self._num_beside = self._num_notes = 0
        self._num_program = 0  # threads of the program that wait
        self._has_given_up = False  # the last wait ran out of time, and the status still says so

    @property
    def _alarm(self) -> Alarm:
        alarm = self._own_alarm
        if alarm is None:
            raise ChannelClosed("the communicator was closed while this thread waited", hint="wait for all works first")
        return alarm

    def until(self, ready: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> bool:
        """Waits until ``ready()``; False if the time is over. ``what`` says for what, in the errors of all ranks. Raises a
        `ChannelClosed` if another thread has closed the communicator meanwhile, although not all ranks came.
        """
        self.forget()
        with self._changed:
            self._num_program += 1
        try:
            return self._spin(ready) or self._sleep_until(ready, timeout_s, what)
        finally:
            with self._changed:
                self._num_program -= 1

    def until_met(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until ``ready()``. Raises `too_late` if the time is over."""
        if not self.until(ready, timeout_s, lambda: f"waits for {what}"):
            raise self.too_late(what, timeout_s)

    def too_late(self, what: str, timeout_s: float) -> ChannelTimeout:
        """The error for what has not happened in time."""
        return ChannelTimeout(f"{what} has not met its other side within {timeout_s:g} s{self.who_waits()}")

    def who_waits(self) -> str:
        """For errors: what all ranks wait for."""
        lines = []
        for name, alarm in self._alarms.items():
            status = "does not say here what it waits for" if alarm is None else alarm.status
            lines.append(f"\n{name} {status or 'does not wait in crossfade.p2p'}")
        return "".join(lines)

    def forget(self) -> None:
        """Clears the status of a wait whose time was over: the program has gone on."""
        alarm = self._own_alarm
        if self._has_given_up and alarm is not None:
            self._has_given_up = False
            with suppress(ValueError):  # another thread has just closed the communicator
                alarm.status = ""

    def set_status(self, status: str) -> None:
        """Says what the rank waits for while no thread of its does."""
        if not self._num_program:
            self._alarm.status = status

    def _spin(self, ready: Callable[[], bool]) -> bool:
        """Looks for a short while, and yields the core in between."""
        end_ns = time.monotonic_ns() + _SPIN_NS
        while True:
            self._look()
            if ready():
                return True
            if time.monotonic_ns() >= end_ns:
                return False
            self._core.give_way()

    def _sleep_until(self, ready: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> bool:
        deadline, alarm = time.monotonic() + timeout_s, self._alarm
        status = ""
        try:
            alarm.status = what()
            while (left_s := deadline - time.monotonic()) > 0:
                if self._sleep(ready, min(left_s, self._slice_s())):
                    return True
            is_ready = ready()
            if not is_ready:
                self._has_given_up = True
                status = f"no longer {what()}: its time was over"  # for the others' errors too
            return is_ready
        finally:
            alarm.status = status

    def attend(self, is_quiet: Callable[[], bool]) -> None:
        """Once no thread of the program waits: waits, and handles what comes, until one does, or there is nothing to wait for."""

        def ready() -> bool:
            return self._num_program > 0 or is_quiet()

        with self._changed:
            while self._num_program:
                self._changed.wait(_REST_S)
        with suppress(ChannelClosed):
            while not ready():
                self._sleep(ready, self._slice_s())

    def _slice_s(self) -> float:
        return _DEVICE_S if self._has_more_to_come() else _SLICE_S

    def bury(self) -> None:
        """Notices ranks that have died."""
        with self._burying:
            dead = [pidfd for pidfd, _ in self._poller.poll(0)]
            for pidfd in dead:
                self._poller.unregister(pidfd)
        for pidfd in dead:
            self._look()  # what it said before
            self._on_death(self._ranks[pidfd])
        if dead:
            self.notify()

    def _sleep(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """One sleep, and a look after it. Whether it is ready.

        One thread sleeps on the alarm for all; the others are woken when that one, or any thread, has found something.
        """
        alarm = self._alarm
        if self._sleeping.acquire(blocking=False):
            try:
                alarm.sleep(lambda: self._look() or ready(), limit_s)
                self._look()
            finally:
                self._sleeping.release()
                self.notify()
        else:
            alarm.ring()  # the attendant may be the sleeper: it makes room
            with self._changed:
                self._num_beside += 1
                num_notes = self._num_notes
            try:
                if not ready():  # which takes the lock that others hold when they notify
                    with self._changed:
                        if self._num_notes == num_notes:
                            self._changed.wait(limit_s)
            finally:
                with self._changed:
                    self._num_beside -= 1
        self.bury()
        return ready()

    def close(self) -> None:
        """Ends all waits, and releases the alarms' memory. A thread that still waits gets a `ChannelClosed`."""
        alarm, self._own_alarm = self._alarm, None
        alarm.ring()
        self.notify()
        self._alarms.clear()

    def notify(self) -> None:
        """Threads that wait look again: this one has found something, or has stopped looking."""
        if self._num_beside:
            with self._changed:
                self._num_notes += 1
                self._changed.notify_all()
