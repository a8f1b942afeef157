"""Handles signals while there is a session, unless the program handles them: SIGUSR1, on which a program that hangs reports what it
waits for, and SIGINT, so that Ctrl-C is raised only where no operation is half done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from crossfade.interrupted import on_interrupt


class _Holder:
    """Holds the function that answers SIGUSR1."""

    answer: Callable[[], object] = object


def install_answer(answer: Callable[[], object]) -> None:
    """Says what the signal is to call."""
    _Holder.answer = answer


def take_signals() -> None:
    """Installs the handlers, if this is the main thread, for the signals that the program does not handle itself."""
    if threading.current_thread() is threading.main_thread():
        for number, theirs, ours in _SIGNALS:
            if signal.getsignal(number) is theirs:
                signal.signal(number, ours)


def release_signals() -> None:
    """Undoes `take_signals`."""
    if threading.current_thread() is threading.main_thread():
        for number, theirs, ours in _SIGNALS:
            if signal.getsignal(number) is ours:
                signal.signal(number, theirs)


def _on_question(number: int, frame: Any) -> None:
    with suppress(Exception):  # it must not end what it is to explain
        _Holder.answer()


_SIGNALS: tuple[tuple[signal.Signals, Any, Any], ...] = (
    (signal.SIGUSR1, signal.SIG_DFL, _on_question),
    (signal.SIGINT, signal.default_int_handler, on_interrupt),
)
