"""The watchdog: streams that wait for a peer that died are let go, who waited is told, and nobody else's signals are touched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.signals import HostBoard, Signal
from crossfade.device.watchdog import DeathReport, Watchdog, release
from crossfade.errors import ChannelBroken
from crossfade.host.memory import Memory
from crossfade.host.processes import await_end, open_pidfd
from tests.helpers.running_driver import RunningDriver, run
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def watchdog(driver: RunningDriver) -> Iterator[Watchdog]:
    made = Watchdog(driver)
    yield made
    made.close()


@pytest.fixture
def stream(driver: RunningDriver) -> int:
    return driver.create_stream("use")


@pytest.fixture
def signal(board: HostBoard) -> Signal:
    return board.signal(0, "a signal")


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    errors: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(str(args.exc_value)))
    return errors


def fail(*_: object) -> None:
    raise KeyError("planted")


def wait_until_idle(driver: RunningDriver, stream: int) -> None:
    until(lambda: driver.is_idle(stream), "the end of a stream")


def test_release_lets_streams_go_and_says_what_they_waited_for(driver: RunningDriver, board: HostBoard) -> None:
    first, second = driver.create_stream("first"), driver.create_stream("second")
    signal, other, counter = board.signal(0, "a signal"), board.signal(1, "another"), board.counter(2, "a counter")
    for _ in range(3):
        signal.wait(first)
    counter.wait(second, 7)
    report = release(driver, "b", lambda: [signal, other, counter], [first, second])
    assert report.is_free
    assert set(report.waited_for) == {"a signal", "a counter"}
    assert "b died, and streams here waited for" in str(report)


def test_release_gives_up_in_the_end(driver: RunningDriver, board: HostBoard) -> None:
    stream = driver.create_stream("first")
    board.signal(0, "of somebody else").wait(stream)
    report = release(driver, "b", list, [stream], limit_s=0.05)
    assert not report.is_free
    assert report.waited_for == ()
    assert "could not be let go" in str(report)


def test_a_watchdog_names_the_peer_that_was_killed(driver: RunningDriver) -> None:
    pool, use = Pool(driver), driver.create_stream("use")
    memory = Memory.create("signals", 65536)
    board = HostBoard(driver, memory, num_signals(2), "ring")
    ring = RingReceiver(driver, pool, board, lambda record: None, "ring", slot_bytes=64)
    ring.accept(Enqueued(0, 0, 8), use)
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watchdog, pidfd, reports, died = Watchdog(driver), open_pidfd(peer.pid), list[DeathReport](), threading.Event()

    def on_death(report: DeathReport) -> None:
        reports.append(report)
        died.set()

    watchdog.watch("worker 7", pidfd, ring.signals, [use], on_death)
    peer.kill()
    assert died.wait(15)
    peer.communicate()
    watchdog.close()
    watchdog.close()
    os.close(pidfd)
    memory.close()
    assert reports[0].waited_for == ("full[0] of ring",)
    assert reports[0].is_free
    ring.break_off(str(reports[0]))
    with pytest.raises(ChannelBroken, match="worker 7 died, and streams here waited for full"):
        ring.accept(Enqueued(0, 1, 8), use)


def test_waits_that_come_after_a_death_are_let_go_until_the_peer_is_forgotten(
    driver: RunningDriver, stream: int, board: HostBoard, signal: Signal, watchdog: Watchdog, killed: int
) -> None:
    died = threading.Event()
    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: died.set())
    assert died.wait(5)
    for _ in range(3):
        signal.wait(stream)
    wait_until_idle(driver, stream)
    watchdog.forget(killed)
    run(driver.machine)
    board.poke(0, 0)
    signal.wait(stream)
    assert not driver.is_idle(stream)
    watchdog.close()
    assert not driver.is_idle(stream)


def test_who_raises_when_it_hears_of_a_death_does_not_stop_the_watchdog(
    watchdog: Watchdog, killed: int, raised: list[str]
) -> None:
    died, second = threading.Event(), os.dup(killed)
    watchdog.watch("worker 7", killed, list, [], fail)
    watchdog.watch("worker 8", second, list, [], lambda report: died.set())
    assert died.wait(5)
    watchdog.close()
    os.close(second)
    assert raised == ["'planted'"]
    assert {report.peer for report in watchdog.reports} == {"worker 7", "worker 8"}


def test_a_death_is_told_before_the_first_signal_is_released(
    driver: RunningDriver, stream: int, signal: Signal, watchdog: Watchdog, killed: int
) -> None:
    """In the watchdog's thread, which holds no lock then: another thread may forget a peer meanwhile."""
    signal.wait(stream)
    seen: list[object] = []
    died = threading.Event()

    def before() -> None:
        other = threading.Thread(target=watchdog.forget, args=(-1,))
        other.start()
        other.join(5)
        seen.extend((other.is_alive(), driver.is_idle(stream), signal.is_set(), threading.current_thread().name))

    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: died.set(), before)
    assert died.wait(5)
    watchdog.close()
    assert seen == [False, False, False, "crossfade-watchdog"]
    assert watchdog.reports[0].waited_for == ("a signal",)


def test_streams_are_let_go_also_where_telling_raises(
    stream: int, signal: Signal, watchdog: Watchdog, killed: int, raised: list[str]
) -> None:
    signal.wait(stream)
    died = threading.Event()
    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: died.set(), fail)
    assert died.wait(5)
    watchdog.close()
    assert raised == ["'planted'"]
    assert watchdog.reports[0].is_free


def test_a_peer_that_is_forgotten_while_its_death_is_told_is_left_alone(
    signal: Signal, watchdog: Watchdog, killed: int
) -> None:
    told = threading.Event()

    def before() -> None:
        watchdog.forget(killed)
        told.set()

    watchdog.watch("worker 7", killed, lambda: [signal], [], lambda report: None, before)
    assert told.wait(5)
    watchdog.close()
    assert watchdog.reports == []
    assert not signal.is_set()


def test_a_stream_that_waits_for_two_who_died_together_is_let_go_at_once(
    stream: int, board: HostBoard, watchdog: Watchdog, killed: int
) -> None:
    """And the first death is told before any signal is set."""
    first, second = board.signal(0, "the first"), board.signal(1, "the second")
    for signal in (first, second, first):
        signal.wait(stream)
    told: list[bool] = []
    died, other = threading.Semaphore(0), os.dup(killed)
    for name, pidfd, signal in (("worker 7", killed, first), ("worker 8", other, second)):
        await_end(pidfd, 10)
        signals = [signal]
        watchdog.watch(
            name,
            pidfd,
            lambda signals=signals: signals,  # type: ignore[misc]
            [stream],
            lambda report: died.release(),
            lambda: told.append(first.is_set() or second.is_set()),
        )
    assert died.acquire(timeout=15)
    assert died.acquire(timeout=15)
    watchdog.close()
    os.close(other)
    assert told[0] is False
    assert all(report.is_free and report.release_s < 1 for report in watchdog.reports)
    assert {report.waited_for for report in watchdog.reports} == {("the first",), ("the second",)}


def test_who_forgets_a_peer_that_has_just_died_waits_until_streams_are_let_go(
    driver: RunningDriver, stream: int, signal: Signal, watchdog: Watchdog, killed: int
) -> None:
    signal.wait(stream)
    told = threading.Event()
    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: None, told.set)
    assert told.wait(5)
    watchdog.forget(killed)
    assert driver.is_idle(stream)
    assert watchdog.reports[0].is_free


@pytest.mark.parametrize("is_late", [False, True])
def test_signals_that_fail_do_not_keep_others_from_being_let_go(
    driver: RunningDriver,
    stream: int,
    signal: Signal,
    watchdog: Watchdog,
    killed: int,
    raised: list[str],
    is_late: bool,
) -> None:
    """At once, or when the streams have run dry and signals are only kept set. It is printed once."""
    has_failed, died, other = threading.Event(), threading.Semaphore(0), os.dup(killed)
    is_failing = not is_late

    def signals() -> list[Signal]:
        if is_failing:
            has_failed.set()
            raise ValueError("these signals are closed")
        return []

    watchdog.watch("worker 7", killed, signals, [], lambda report: died.release())
    if is_late:
        assert died.acquire(timeout=15)
        is_failing = True
    assert has_failed.wait(5)
    signal.wait(stream)
    watchdog.watch("worker 8", other, lambda: [signal], [stream], lambda report: died.release())
    wait_until_idle(driver, stream)
    assert died.acquire(timeout=15)
    watchdog.forget(killed)
    watchdog.close()
    os.close(other)
    assert raised == ["these signals are closed"]
    assert [report.peer for report in watchdog.reports if report.is_free] == ["worker 7", "worker 8"][not is_late :]


def test_who_closes_signals_of_the_dead_waits_for_the_step_that_sets_them(watchdog: Watchdog, killed: int) -> None:
    """Also where the peer is not forgotten, since others still wait for it."""
    is_in, may_go = threading.Event(), threading.Event()

    class Slow:
        label = "a signal"

        def is_set(self) -> bool:
            is_in.set()
            assert may_go.wait(5)
            return True

        def is_missed(self, was_released: bool) -> bool:
            return False

        def release(self) -> None: ...

    watchdog.watch("worker 7", killed, lambda: [Slow()], [], lambda report: None)
    assert is_in.wait(5)
    closer = threading.Thread(target=watchdog.pause)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    may_go.set()
    closer.join(5)
    assert not closer.is_alive()


def test_a_peer_that_is_forgotten_may_end(driver: RunningDriver) -> None:
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watchdog, pidfd = Watchdog(driver), open_pidfd(peer.pid)
    watchdog.watch("worker 7", pidfd, list, [], lambda report: None)
    watchdog.forget(pidfd)
    peer.communicate(b"\n")
    watchdog.close()
    os.close(pidfd)
    assert watchdog.reports == []
