"""A signal that comes to the main thread once something is so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def send(number: int) -> None:
    """Sends it to the main thread, now."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)


@contextmanager
def sent_once(
    number: int, is_so: Callable[[], object], again_s: float | None = None, has_come: threading.Event | None = None
) -> Iterator[None]:
    """Meanwhile another thread looks whether it is so, every millisecond, and sends the signal when it is.

    It is sent again after each ``again_s``, until the handler sets ``has_come`` or this context ends: a signal that comes between
    the interpreter's last look for one and a system call does not end the call.
    """
    is_over = threading.Event()

    def look() -> None:
        while not is_so():
            if is_over.wait(0.001):
                return
        send(number)
        while again_s is not None and not is_over.wait(again_s) and not (has_come is not None and has_come.is_set()):
            send(number)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
