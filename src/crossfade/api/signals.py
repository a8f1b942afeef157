"""SIGUSR1: a program that stands still can be asked from outside what it waits for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["install_answer", "release_signal", "take_signal"]


class _Holder:
    """What answers the signal."""

    answer: Callable[[], object] = object


def install_answer(answer: Callable[[], object]) -> None:
    """Says what the signal is to call."""
    _Holder.answer = answer


def take_signal() -> None:
    """Takes the signal, where the program has not taken it itself and this is the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)


def release_signal() -> None:
    """Undoes `take_signal`."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is _on_signal:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _on_signal(number: int, frame: Any) -> None:
    with suppress(Exception):  # it must not end what it is to explain
        _Holder.answer()
