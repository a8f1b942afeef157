"""Signals that crossfade takes while there is a session, where the program has not: SIGUSR1, by which a program that stands still
can be asked from outside what it waits for, and SIGINT, so that Ctrl-C comes where everything is whole.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from crossfade.interrupted import on_interrupt

__all__ = ["install_answer", "release_signals", "take_signals"]


class _Holder:
    """What answers SIGUSR1."""

    answer: Callable[[], object] = object


def install_answer(answer: Callable[[], object]) -> None:
    """Says what the signal is to call."""
    _Holder.answer = answer


def take_signals() -> None:
    """Takes the signals, where the program has not taken them itself and this is the main thread."""
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
