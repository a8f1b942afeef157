"""A doorbell may be closed by any thread while others wait at it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from crossfade.errors import SessionError
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.interrupted import heard_sleep

pytestmark = pytest.mark.timeout(30)

LIMIT_S = 20.0


def in_thread(act: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Does something in a thread. What is returned waits for its end, and gives what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> BaseException | None:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        return errors[0] if errors else None

    return join


def num_open(fds: tuple[int, ...]) -> int:
    num = 0
    for fd in fds:
        with suppress(OSError):
            os.fstat(fd)
            num += 1
    return num


def looked(num: int) -> tuple[Callable[[], bool], threading.Event]:
    """Something that is never ready, and an event that is set once it was looked at so many times."""
    looks, event = [0], threading.Event()

    def ready() -> bool:
        looks[0] += 1
        if looks[0] >= num:
            event.set()
        return False

    return ready, event


@contextmanager
def handled(handle: Callable[[], object], after_s: float) -> Iterator[None]:
    """A signal reaches this thread in so many seconds, and this is its handler."""
    before = signal.signal(signal.SIGUSR2, lambda *_: handle())
    timer = threading.Timer(after_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR2))
    timer.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_main_thread_looks_again_where_a_signal_was_lost(doorbell: Doorbell) -> None:
    """A handler that Python runs only at the next look, as after a signal just before the system call, is as a time that passes."""
    begin_s = time.monotonic()
    assert doorbell.wait_until(lambda: time.monotonic() > begin_s + 0.2)
    assert time.monotonic() - begin_s < LIMIT_S / 2


def test_who_hears_no_interrupt_sleeps_as_long_as_it_may() -> None:
    assert (heard_sleep(None), heard_sleep(0.5), heard_sleep(5.0)) == (1.0, 0.5, 1.0)
    seen: list[float | None] = []
    join = in_thread(lambda: seen.extend((heard_sleep(None), heard_sleep(5.0))))
    assert join() is None
    assert seen == [None, 5.0]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in actors
    try:
        assert heard_sleep(None) is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("num_waiting", [1, 2, 4])
def test_whoever_waits_when_it_is_closed_is_told(doorbell: Doorbell, num_waiting: int) -> None:
    fds = doorbell.event_fd, doorbell.memory_fd
    joins = []
    for _ in range(num_waiting):
        ready, is_looking = looked(1)
        joins.append(in_thread(lambda ready=ready: doorbell.wait_until(ready)))  # type: ignore[misc]
        assert is_looking.wait(LIMIT_S)
    doorbell.close()
    assert all(isinstance(join(), SessionError) for join in joins)
    assert num_open(fds) == 0
    with pytest.raises(SessionError):
        doorbell.wait_until(lambda: False)
    with pytest.raises(SessionError):
        doorbell.new_poller()
    assert doorbell.wait_until(lambda: True)
    doorbell.nudge()
    doorbell.pump()
    doorbell.close()


def test_the_descriptors_live_until_a_handler_is_done(doorbell: Doorbell) -> None:
    fds = doorbell.event_fd, doorbell.memory_fd
    is_handling, may_end = threading.Event(), threading.Event()
    read_fd, write_fd = os.pipe()

    def handle() -> None:
        is_handling.set()
        assert may_end.wait(LIMIT_S)
        doorbell.unwatch(read_fd)

    doorbell.watch(read_fd, handle)
    join = in_thread(lambda: doorbell.wait_until(may_end.is_set))
    os.write(write_fd, b"x")
    assert is_handling.wait(LIMIT_S)
    doorbell.close()
    assert num_open(fds) == 2
    may_end.set()
    assert join() is None  # what it waited for has come
    assert num_open(fds) == 0
    os.close(read_fd)
    os.close(write_fd)


def test_a_signal_s_handler_may_close_it(doorbell: Doorbell) -> None:
    fds = doorbell.event_fd, doorbell.memory_fd
    with handled(doorbell.close, 0.02), pytest.raises(SessionError, match="shut down"):
        doorbell.wait_until(lambda: False)
    assert num_open(fds) == 0


def test_a_signal_s_handler_may_nudge_while_its_own_thread_holds_the_lock(doorbell: Doorbell) -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: doorbell.nudge())
    try:
        with doorbell._lock:
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_wait_within_a_handler_takes_no_wake_up_away(doorbell: Doorbell, is_beside: bool) -> None:
    """The handler waits through several rings, and what its thread waits for comes with one of them."""
    num_rings, is_looking, may_end = 0, threading.Event(), threading.Event()
    bell = doorbell.bell()

    def ring() -> None:
        nonlocal num_rings
        for _ in range(5):
            assert is_looking.wait(LIMIT_S)
            is_looking.clear()
            num_rings += 1
            bell.ring_if_asleep()

    def handle() -> None:
        join = in_thread(ring)
        assert doorbell.wait_until(look, LIMIT_S)
        assert join() is None

    def look() -> bool:
        is_looking.set()
        return num_rings == 5

    join_other = None
    if is_beside:
        ready, has_looked = looked(1)
        join_other = in_thread(lambda: doorbell.wait_until(lambda: ready() or may_end.is_set(), LIMIT_S))
        assert has_looked.wait(LIMIT_S)
    with handled(handle, 0.05):
        begin_s = time.monotonic()
        assert doorbell.wait_until(lambda: num_rings >= 3, LIMIT_S)
        assert time.monotonic() - begin_s < LIMIT_S / 2
    may_end.set()
    doorbell.nudge()
    assert join_other is None or join_other() is None
    bell.close()


def test_a_thread_beside_is_woken_though_the_sleeper_s_handler_waits(doorbell: Doorbell) -> None:
    """The handler waits for what a thread does that relies on the handler's thread to be woken."""
    bell, has_value, is_done = doorbell.bell(), threading.Event(), threading.Event()
    is_beside = threading.Event()

    def look() -> bool:
        is_beside.set()
        return has_value.is_set()

    def post() -> None:
        has_value.set()
        bell.ring_if_asleep()

    def beside() -> None:
        assert doorbell.wait_until(look, LIMIT_S)
        is_done.set()
        doorbell.nudge()

    def handle() -> None:
        join = in_thread(beside)
        assert is_beside.wait(LIMIT_S)
        timer = threading.Timer(0.05, post)
        timer.start()
        begin_s = time.monotonic()
        assert doorbell.wait_until(is_done.is_set, LIMIT_S)
        assert time.monotonic() - begin_s < LIMIT_S / 2
        assert join() is None

    with handled(handle, 0.05):
        assert doorbell.wait_until(is_done.is_set, LIMIT_S)
    bell.close()


def test_a_handler_s_wait_at_a_closed_doorbell_ends_well_where_it_is_over(doorbell: Doorbell) -> None:
    def handle() -> None:
        doorbell.close()
        assert doorbell.wait_until(lambda: True)

    with handled(handle, 0.02), pytest.raises(SessionError):
        doorbell.wait_until(lambda: False)


@pytest.mark.parametrize("spin_us", [0.0, 150.0])
def test_what_a_handler_took_in_is_found_before_sleeping_though_nothing_more_comes(spin_us: float) -> None:
    doorbell = Doorbell(*Doorbell.create_fds("test"), spin_us=spin_us)
    begin_s = time.monotonic()
    assert doorbell.wait_until(lambda: True, LIMIT_S, idle=lambda: True)
    assert time.monotonic() - begin_s < LIMIT_S / 2
    doorbell.close()


@pytest.mark.parametrize("kind", ["bell", "doorbell"])
def test_an_error_behind_a_closed_descriptor_does_not_have_it_closed_again(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A signal's handler may raise there; the number may be somebody else's by the next call."""
    doorbell = Doorbell(*Doorbell.create_fds("test"))
    end: Bell | Doorbell = doorbell if kind == "doorbell" else doorbell.bell()
    closed: list[int] = []
    close = os.close

    def close_and_raise(fd: int) -> None:
        close(fd)
        closed.append(fd)
        if len(closed) == 1:
            raise TimeoutError

    monkeypatch.setattr(os, "close", close_and_raise)
    with pytest.raises(TimeoutError):
        end.close()
    end.close()
    doorbell.close()
    assert len(closed) == len(set(closed))
