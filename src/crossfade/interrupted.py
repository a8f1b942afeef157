"""Ctrl-C and other signals: delays interrupts until the running function is complete, and recognises errors that handlers raise.

Handlers run between any two steps of the main thread. An interrupt raised there would leave half a message, or lose a value that
was just taken. So crossfade handles SIGINT (`crossfade.api.signals`), and `on_interrupt` looks at the stack that it interrupts:
the innermost marked function decides.

- in a function that is `whole` (or `uninterrupted`), the interrupt is held back, and raised when that function ends;
- in `pause`, where such a function waits, and in a function that is `interruptible`, it is raised at once;
- in a function that is `brief`, it is sent again a little later; where no function is marked, it is raised at once, as Python does.

An interrupt that arrives when another one has been held back for a second is raised wherever it is. Marks cost nothing when a
function is called. If crossfade does not handle SIGINT, or another signal's handler raises, errors can occur anywhere: they end a
graph in the middle of a value, but never break a message (`crossfade.host.sockets`).
"""

from __future__ import annotations

import _thread
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar, cast

__all__ = [
    "Held",
    "breathe",
    "brief",
    "came_while_waiting",
    "checkpoint",
    "heard_sleep",
    "interruptible",
    "longest_sleep",
    "on_interrupt",
    "passed_through",
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
"""Once an interrupt has been held back for this long, the next one is raised at once."""

_DEAF_S = 0.1
"""The longest sleep of the main thread on a condition, which an interrupt does not wake."""

_LOST_S = 1.0
"""The longest sleep of the main thread in a call that an interrupt ends, unless it came just before."""

_BRIEF_S = 0.001

_OWN_PACKAGES = frozenset({"crossfade", *sys.stdlib_module_names})

_whole: set[CodeType] = set()
_brief: set[CodeType] = set()
_open: set[CodeType] = set()


def _mark(function: _F, marked: set[CodeType]) -> _F:
    marked.add(cast(Any, function).__code__)
    return function


def _is_compiled(function: Callable[..., Any]) -> bool:
    return not hasattr(function, "__code__")


class Held:
    """The state of the interrupt that is held back."""

    is_pending = False
    since_s = 0.0  # when it arrived, on the monotonic clock


def whole(function: _F) -> _F:
    """Marks a function in which interrupts are held back. The function must end with `raise_held` if one is pending."""
    return _mark(function, _whole)


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function in which interrupts are held back: a pending one is raised at its end."""

    @functools.wraps(function)
    def until_done(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        finally:
            if Held.is_pending:
                raise_held()

    _mark(until_done, _whole)  # the one code of all such wrappers: what they call may be compiled, and have no frame
    return until_done


def brief(function: _F) -> _F:
    """Marks a short function such as a destructor: an interrupt is sent again after it. (An error raised inside would be lost.)

    A compiled one, which must call no Python code, needs no mark: no handler runs in it.
    """
    return function if _is_compiled(function) else _mark(function, _brief)


def interruptible(function: _F) -> _F:
    """Marks a function in which interrupts are raised at once, even if the caller holds them back."""
    return _mark(function, _open)


def checkpoint() -> None:
    """Raises the pending interrupt, if any, inside a function that holds interrupts back; the caller can undo its work here."""
    if Held.is_pending:
        _release(sys._getframe())


@interruptible
def pause(wait: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls a function that waits; an interrupt, also a pending one, ends the wait even inside a function that holds them back."""
    checkpoint()
    return wait(*args, **kwargs)


def longest_sleep(timeout_s: float | None) -> float | None:
    """Returns how long to sleep on a condition: at most 0.1 s in the main thread, as no interrupt ends it. Raises a held one."""
    if threading.get_ident() != threading.main_thread().ident:
        return timeout_s
    checkpoint()
    return _DEAF_S if timeout_s is None else min(timeout_s, _DEAF_S)


def heard_sleep(timeout_s: float | None) -> float | None:
    """Returns how long to sleep in a call that an interrupt ends: at most a second in a main thread to which interrupts come. One
    that comes between Python's last look for signals and the call does not end it.
    """
    is_deaf = (
        threading.get_ident() != threading.main_thread().ident or signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    )
    if is_deaf:
        return timeout_s
    return _LOST_S if timeout_s is None else min(timeout_s, _LOST_S)


def breathe() -> None:
    """Lets handlers of signals and other threads run, as Python does between two steps: a loop that is compiled does not."""


def raise_held() -> None:
    """Raises the pending interrupt, unless a caller further out holds interrupts back too."""
    frame = sys._getframe(1)
    if not _is_marked(frame.f_back, _whole):
        _release(frame)


def on_interrupt(number: int, frame: FrameType | None) -> None:
    """Handles SIGINT: raises the interrupt, holds it back, or sends it again later."""
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
    """Whether an error was raised inside a `pause`, by any handler: no operation was left half done then."""
    return any(frame.f_code is cast(Any, pause).__code__ for frame, _ in walk_tb(error.__traceback__))


def passed_through_others(error: BaseException) -> bool:
    """Whether an error came through code that is neither ours nor Python's own. Its type does not tell: handlers raise ours."""
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))
    return any(module.partition(".")[0] not in _OWN_PACKAGES for module in modules)


def passed_through(error: BaseException, module: str) -> bool:
    """Whether an error came through code of a module, or out of what that called."""
    return any(frame.f_globals.get("__name__") == module for frame, _ in walk_tb(error.__traceback__))


def _is_marked(frame: FrameType | None, marked: set[CodeType]) -> bool:
    """Whether the innermost marked function on the stack has this mark."""
    while frame is not None:
        code = frame.f_code
        if code in _whole or code in _brief or code in _open:
            return code in marked
        frame = frame.f_back
    return False


def _release(frame: FrameType | None) -> None:
    """Raises the interrupt as Python does: in `asyncio.run` the first one cancels the main task instead."""
    if threading.get_ident() != threading.main_thread().ident:
        return  # the interrupt is for the main thread
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
