"""A timer that one thread waits for and others set: a system call to set it, and nothing of the interpreter's until it is due."""

from __future__ import annotations

import ctypes
import os

from crossfade.host.memory import libc, libc_error

_CLOCK_MONOTONIC = 1
_TFD_CLOEXEC = os.O_CLOEXEC


class _Spec(ctypes.Structure):
    """``struct itimerspec``: the interval, and the time until the timer is due."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("due_s", ctypes.c_long),
        ("due_ns", ctypes.c_long),
    )


class Timer:
    """A ``timerfd`` (which Python's own library has from 3.13 on), due ``delay_us`` after `start`."""

    def __init__(self, delay_us: float) -> None:
        self._set_time = libc().timerfd_settime
        self.fd = libc().timerfd_create(_CLOCK_MONOTONIC, _TFD_CLOEXEC)
        if self.fd < 0:
            raise libc_error()
        self._delay, self._at_once = _spec(max(1, round(delay_us * 1000))), _spec(1)
        self._delay_at, self._at_once_at = ctypes.addressof(self._delay), ctypes.addressof(self._at_once)

    def start(self) -> None:
        """It is due after its delay from now, also if it was started before."""
        self._set_time(self.fd, 0, self._delay_at, None)

    def start_in(self, delay_us: float) -> None:
        """It is due so long from now, also if it was started before."""
        spec = _spec(max(1, round(delay_us * 1000)))
        self._set_time(self.fd, 0, ctypes.addressof(spec), None)

    def ring(self) -> None:
        """It is due now."""
        self._set_time(self.fd, 0, self._at_once_at, None)

    def wait(self) -> None:
        """Blocks until it is due."""
        os.read(self.fd, 8)

    def close(self) -> None:
        """Gives the descriptor back. Nobody may wait any more. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _spec(delay_ns: int) -> _Spec:
    return _Spec(0, 0, *divmod(delay_ns, 1_000_000_000))
