"""What comes in between: Ctrl-C, which waits until what it came into is whole, and errors that a signal's handler has raised.

Handlers run between any two steps of the main thread. An interrupt raised there would leave half a message, or a value in nobody's
hands. So crossfade takes SIGINT (`crossfade.api.signals`), and `on_interrupt` looks where it has come: the innermost function
that is marked decides.

- in a function that is `whole` (or `uninterrupted`) it is held back, and raised when that function is done;
- in `pause`, where such a function waits, and in a function that is `interruptible`, it is raised at once;
- elsewhere too, as Python does.

An interrupt that comes when another one has been held back for a second is raised wherever it is. Marks cost nothing when a
function is called. Who does not have SIGINT taken, or raises from other signals, has errors come anywhere: they end
a graph in the middle of a value, but no message (`crossfade.host.sockets`).
"""

from __future__ import annotations

import _thread
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar, cast

__all__ = [
    "Held",
    "brief",
    "came_while_waiting",
    "checkpoint",
    "interruptible",
    "longest_sleep",
    "on_interrupt",
    "passed_through_others",
    "pause",
    "raise_held",
    "uninterrupted",
    "whole",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

PATIENCE_S = 1.0
"""An interrupt that has been held back for so long does not hold the next one back."""

_DEAF_S = 0.1
"""The longest sleep of the main thread on what an interrupt does not wake."""

_BRIEF_S = 0.001

_OWN_PACKAGES = frozenset({"crossfade", *sys.stdlib_module_names})

_whole: set[CodeType] = set()
_brief: set[CodeType] = set()
_open: set[CodeType] = set()


def _mark(function: _F, marked: set[CodeType]) -> _F:
    marked.add(cast(Any, function).__code__)
    return function


class Held:
    """The interrupt that is held back.

    Attributes:
        is_pending: whether there is one.
        since_s: since when, on the monotonic clock.
    """

    is_pending = False
    since_s = 0.0


def whole(function: _F) -> _F:
    """Marks a function in which interrupts are held back. At its end it calls `raise_held` if one is."""
    return _mark(function, _whole)


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Has interrupts held back in a function, and raised at its end."""

    @functools.wraps(function)
    def until_done(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        finally:
            if Held.is_pending:
                raise_held()

    _mark(function, _whole)
    return until_done


def brief(function: _F) -> _F:
    """Marks a function of a few steps, as a destructor: an interrupt comes again behind it. (Raised inside, it would be lost.)"""
    return _mark(function, _brief)


def interruptible(function: _F) -> _F:
    """Marks a function in which interrupts are raised at once, whoever calls it."""
    return _mark(function, _open)


def checkpoint() -> None:
    """Raises the interrupt that is held back, in the middle of a function that is whole but for this: it can be undone here."""
    if Held.is_pending:
        _release(sys._getframe())


@interruptible
def pause(wait: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Waits, in the middle of a function that is whole but for this: an interrupt, a held one too, ends the wait."""
    checkpoint()
    return wait(*args, **kwargs)


def longest_sleep(timeout_s: float | None) -> float | None:
    """How long to sleep on a condition, which is no `pause`: not long in the main thread. Raises an interrupt that has come."""
    if threading.get_ident() != threading.main_thread().ident:
        return timeout_s
    checkpoint()
    return _DEAF_S if timeout_s is None else min(timeout_s, _DEAF_S)


def raise_held() -> None:
    """Raises the interrupt that is held back, unless the caller has been called by a function in which it is, too."""
    frame = sys._getframe(1)
    if not _is_marked(frame.f_back, _whole):
        _release(frame)


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of SIGINT."""
    if _is_marked(frame, _brief):
        _thread.start_new_thread(_interrupt_again, ())
        return
    if _is_marked(frame, _whole):
        now_s = time.monotonic()
        if not Held.is_pending:
            Held.is_pending, Held.since_s = True, now_s
        if now_s - Held.since_s < PATIENCE_S:
            return
    Held.is_pending = True
    _release(frame)


def _interrupt_again() -> None:
    time.sleep(_BRIEF_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def came_while_waiting(error: BaseException) -> bool:
    """Whether an error was raised in a `pause`, by whatever handler: everything is whole there."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is cast(Any, pause).__code__:
            return True
        trace = trace.tb_next
    return False


def passed_through_others(error: BaseException) -> bool:
    """Whether an error came through code that is neither ours nor Python's own. Its type does not tell: handlers raise ours."""
    trace = error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OWN_PACKAGES:
            return True
        trace = trace.tb_next
    return False


def _is_marked(frame: FrameType | None, marked: set[CodeType]) -> bool:
    """Whether the innermost function with a mark has that one."""
    while frame is not None:
        code = frame.f_code
        if code in _whole or code in _brief or code in _open:
            return code in marked
        frame = frame.f_back
    return False


def _release(frame: FrameType | None) -> None:
    """Raises the interrupt, as Python does: in `asyncio.run` the first one cancels the main task instead."""
    if threading.get_ident() != threading.main_thread().ident:
        return  # it is the main thread's
    Held.is_pending = False
    runners = sys.modules.get("asyncio.runners")
    while runners is not None and frame is not None:
        if frame.f_code is runners.Runner.run.__code__:
            task = frame.f_locals.get("task")
            if task is not None:
                frame.f_locals["self"]._on_sigint(signal.SIGINT, frame, task)
                return
        frame = frame.f_back
    raise KeyboardInterrupt
