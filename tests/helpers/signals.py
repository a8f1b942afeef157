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
def sent_once(number: int, is_so: Callable[[], object], has_come: threading.Event | None = None) -> Iterator[None]:
    """Meanwhile another thread looks whether it is so, every millisecond, and sends the signal when it is.

    ``has_come``: set by the handler. Until then it is sent again: a signal that comes between the interpreter's last look for one
    and a system call does not end the call.
    """
    is_over = threading.Event()

    def look() -> None:
        while not is_so():
            if is_over.wait(0.001):
                return
        send(number)
        while has_come is not None and not has_come.wait(0.2) and not is_over.is_set():
            send(number)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
