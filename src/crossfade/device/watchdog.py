"""Releases the streams that wait for a dead peer, and says which signals they waited for.

A wait on a stream has no time limit. When a peer's process ends, everything that it would have set is set from the host, again
and again, until the streams have run dry: what they compute on the way is rubbish, which the error says, but the device is usable
afterwards. The peer's signals are then kept set until it is forgotten, for waits that were enqueued before the program had heard of
the death, or that stand behind long computations.

First mark, then release: a program that must not take rubbish for a result is told before the first signal is set
(``before_release``).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from crossfade.device.driver import Driver
from crossfade.device.signals import Releasable

_PAUSE_S = 0.0005
_LIMIT_S = 1.5
_KEEP_S = 0.02


@dataclass(frozen=True, slots=True)
class DeathReport:
    """What happened when a peer died."""

    peer: str
    waited_for: tuple[str, ...]  # the signals that streams here were waiting for
    release_s: float  # how long it took until the streams had run dry
    is_free: bool  # whether they had, within the time limit

    def __str__(self) -> str:
        waited = f", and streams here waited for {', '.join(self.waited_for)}" if self.waited_for else ""
        stuck = "" if self.is_free else "; they could not be let go"
        return f"{self.peer} died{waited}{stuck}"


@dataclass
class _Watched:
    peer: str
    signals: Callable[[], Sequence[Releasable]]
    streams: Sequence[int]
    on_death: Callable[[DeathReport], None]
    before_release: Callable[[], None]
    has_complained: bool = False


def _nothing() -> None: ...


class Watchdog:
    """One thread that sleeps until a peer dies."""

    def __init__(self, driver: Driver) -> None:
        self.reports: list[DeathReport] = []  # one for each peer that died
        self._driver = driver
        self._watched: dict[int, _Watched] = {}
        self._dead: dict[int, _Watched] = {}
        self._releases: dict[int, _Release] = {}  # of the dead whose streams here have not run dry yet
        self._lock = threading.Condition()  # held while signals are set, so that they can be closed after `forget`
        self._poller = select.epoll()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._poller.register(self._wake_read, select.EPOLLIN)
        self._thread: threading.Thread | None = None

    def watch(
        self,
        peer: str,
        pidfd: int,
        # Gives what the peer sets and streams here may wait for; any thread may call it.
        signals: Callable[[], Sequence[Releasable]],
        streams: Sequence[int],
        # Called once, in the watchdog's thread, when the streams have been released.
        on_death: Callable[[DeathReport], None],
        # Called once, in the watchdog's thread, before the first signal is set. It must not wait for a stream. If it raises, that
        # is printed, and the streams are released all the same.
        before_release: Callable[[], None] = _nothing,
    ) -> None:
        """Watches one peer, by a ``pidfd`` that stays the caller's."""
        with self._lock:
            self._watched[pidfd] = _Watched(peer, signals, streams, on_death, before_release)
            self._poller.register(pidfd, select.EPOLLIN)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="crossfade-watchdog", daemon=True)
                self._thread.start()

    def forget(self, pidfd: int) -> None:
        """The peer may go, or has gone; its signals are not touched any more when this returns, so they may be closed.

        If streams are being released because it died, this waits for the end of that; in the watchdog's own thread it stops it.
        """
        with self._lock:
            if self._watched.pop(pidfd, None) is not None:
                self._poller.unregister(pidfd)
            if threading.current_thread() is not self._thread:
                self._lock.wait_for(lambda: pidfd not in self._releases, 2 * _LIMIT_S)
            self._releases.pop(pidfd, None)
            self._dead.pop(pidfd, None)

    def _run(self) -> None:
        self._driver.enter_thread()
        is_closing = False
        while True:
            for fd, _ in self._poller.poll(_PAUSE_S if self._releases else _KEEP_S if self._dead else None):
                if fd == self._wake_read:
                    self._poller.unregister(fd)
                    is_closing = True
                else:
                    self._tell(fd)
            for watched, report in self._let_go():
                _call(partial(watched.on_death, report))
            if is_closing and not self._releases:
                return

    def _tell(self, pidfd: int) -> None:
        """A peer has died. Nothing is released before it is told, and it is told without the lock: whoever that has to wait for
        may be about to watch or forget a peer.
        """
        with self._lock:
            watched = self._watched.pop(pidfd, None)
            if watched is None:  # forgotten in this very moment
                return
            self._poller.unregister(pidfd)
            self._dead[pidfd] = watched
            self._releases[pidfd] = _Release(self._driver, watched.peer, watched.signals, watched.streams)
        _call(watched.before_release)

    def _let_go(self) -> list[tuple[_Watched, DeathReport]]:
        """Sets what each of the dead would have set; gives the dead for which nothing waits any more, with their reports."""
        done: list[tuple[_Watched, DeathReport]] = []
        with self._lock:
            for pidfd, watched in self._dead.items():
                report = self._step(watched, self._releases.get(pidfd))
                if report is not None:
                    del self._releases[pidfd]
                    self.reports.append(report)
                    done.append((watched, report))
            if done:
                self._lock.notify_all()
        return done

    def _step(self, watched: _Watched, release: _Release | None) -> DeathReport | None:
        """Sets what one of the dead would have set. What that raises is printed once, and keeps no other from being released."""
        try:
            if release is not None:
                return release.step()
            _release_all(watched.signals())
        except Exception as error:
            if not watched.has_complained:
                watched.has_complained = True
                _print(error)
            if release is not None:
                return release.end_in_time()
        return None

    def pause(self) -> None:
        """Waits for the end of a step under way: afterwards signals that are not to be set any more may be closed."""
        with self._lock:
            pass

    def close(self) -> None:
        """Ends the thread, and releases no stream any more. Idempotent."""
        if self._wake_write < 0:
            return
        os.write(self._wake_write, b"x")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._poller.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._wake_write = -1


def _call(function: Callable[[], None]) -> None:
    """Calls it; what it raises is printed, since other peers must be watched all the same."""
    try:
        function()
    except Exception as error:
        _print(error)


def _print(error: Exception) -> None:
    threading.excepthook(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    )


def _release_all(signals: Sequence[Releasable]) -> list[str]:
    """Sets all that are not set; gives their labels."""
    found = [signal for signal in signals if not signal.is_set()]
    for signal in found:
        signal.release()
    return [signal.label for signal in found]


@dataclass(eq=False)
class _Release:
    """Streams that are being released after a death.

    A signal counts as waited for when a stream takes it away again after it was set here; a counter, when it is behind what was
    waited for.
    """

    _driver: Driver
    _peer: str
    _signals: Callable[[], Sequence[Releasable]]
    _streams: Sequence[int]
    _limit_s: float = _LIMIT_S
    _begin: float = field(default_factory=time.monotonic)
    _released: set[str] = field(default_factory=set)
    _waited_for: dict[str, None] = field(default_factory=dict)
    _is_dry: bool = False

    def step(self) -> DeathReport | None:
        """Sets what is not set; the report once the streams had run dry before that, or the time is over."""
        current = self._signals()
        for signal in current:
            if signal.is_missed(signal.label in self._released):
                self._waited_for[signal.label] = None
        self._released.update(_release_all(current))
        report = self._report() if self._is_dry else self.end_in_time()
        if report is None:
            self._is_dry = all(map(self._driver.is_idle, self._streams))
        return report

    def end_in_time(self) -> DeathReport | None:
        """The report once the time is over."""
        return self._report() if time.monotonic() - self._begin > self._limit_s else None

    def _report(self) -> DeathReport:
        return DeathReport(self._peer, tuple(self._waited_for), time.monotonic() - self._begin, self._is_dry)


def release(
    driver: Driver,
    peer: str,
    signals: Callable[[], Sequence[Releasable]],
    streams: Sequence[int],
    limit_s: float = _LIMIT_S,
) -> DeathReport:
    """Sets what the peer would have set until the streams have run dry, or for at most ``limit_s`` seconds."""
    step = _Release(driver, peer, signals, streams, limit_s).step
    while (report := step()) is None:
        time.sleep(_PAUSE_S)
    return report
