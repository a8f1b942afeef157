"""The timer that wakes a thread."""

from __future__ import annotations

import threading
import time

import pytest

from crossfade.host.timer import Timer


def test_it_is_due_after_its_delay() -> None:
    timer = Timer(20_000)
    begin = time.monotonic()
    timer.start()
    timer.wait()
    assert time.monotonic() - begin >= 0.02
    timer.close()
    timer.close()


def test_each_start_puts_it_off_and_ring_does_not_wait() -> None:
    timer = Timer(3600e6)
    for _ in range(5):
        timer.start()
    woken = threading.Event()

    def wait() -> None:
        timer.wait()
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not woken.is_set()
    timer.ring()
    assert woken.wait(10)
    thread.join()
    timer.close()


def test_a_closed_timer_is_closed() -> None:
    timer = Timer(1)
    timer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        timer.wait()
