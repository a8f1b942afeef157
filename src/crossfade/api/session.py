"""The session: which engine runs the actors of this program, from ``init`` (or the first actor) to ``shutdown``."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import uuid
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from crossfade.api.signals import release_signal, take_signal
from crossfade.engines.protocol import DEFAULT_SPIN_US
from crossfade.errors import SessionError

if TYPE_CHECKING:
    from crossfade.api.compiled import CompiledGraph
    from crossfade.engines.protocol import Engine, OpenPlan

__all__ = ["Session", "current", "init", "is_initialized", "require", "shutdown"]

_ENGINES = ("local", "inline")


class Session:
    """Everything between one ``init`` and its ``shutdown``.

    Attributes:
        id: tells sessions apart.
        engine: runs the actors.
        graphs: the compiled graphs that are alive.
        orphans: open plans whose graph was dropped without a teardown.
    """

    def __init__(self, engine: Engine) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.pid = os.getpid()
        self.engine = engine
        self.graphs: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
        self.orphans: deque[OpenPlan] = deque()
        self._names: set[str] = set()
        self._counters: dict[str, itertools.count[int]] = {}
        self._lock = threading.Lock()

    def name_actor(self, class_name: str, asked: str | None) -> str:
        """A name for a new actor: the asked one, else the class's with a number.

        Raises:
            SessionError: the asked name is taken.
        """
        with self._lock:
            if asked is not None:
                if asked in self._names:
                    raise SessionError(
                        f"there is an actor named {asked!r} already", hint="give it another name in options(name=...)"
                    )
                self._names.add(asked)
                return asked
            counter = self._counters.setdefault(class_name, itertools.count())
            name = next(name for name in (f"{class_name}{n}" for n in counter) if name not in self._names)
            self._names.add(name)
            return name

    def forget_name(self, name: str) -> None:
        """The actor could not be started: its name is free again."""
        with self._lock:
            self._names.discard(name)

    def bury_orphans(self) -> None:
        """Takes the plans of dropped graphs from their actors."""
        while self.orphans:
            self.orphans.popleft().leave()

    def close(self) -> None:
        """Tears all graphs down and ends all actors."""
        for graph in list(self.graphs):
            graph._abandon()
        self.engine.close()


class _Holder:
    """Where the program's session is."""

    session: Session | None = None
    lock = threading.RLock()


def init(*, engine: str = "local", spin_us: float = DEFAULT_SPIN_US, ignore_reinit_error: bool = False) -> Session:
    """Starts a session. The first actor starts one by itself, so this is needed only to choose.

    Args:
        engine: ``local`` runs each actor as a process of this host; ``inline`` runs all of them in this thread, deterministically,
            for tests and debuggers.
        spin_us: how long, in microseconds, a process that waits looks for work (yielding its core) before it sleeps. 0 sleeps at
            once, which suits machines with more processes than cores and calls that are far apart.
        ignore_reinit_error: return the running session instead of raising.

    Raises:
        SessionError: there is a session already.
        ValueError: no such engine.
    """
    if engine not in _ENGINES:
        raise ValueError(f"unknown engine {engine!r}\nhint: one of {', '.join(_ENGINES)}")
    with _Holder.lock:
        running = current()
        if running is not None:
            if ignore_reinit_error:
                return running
            raise SessionError("crossfade is initialised already", hint="call crossfade.shutdown() first")
        _Holder.session = Session(_make_engine(engine, spin_us))
        take_signal()
        return _Holder.session


def _make_engine(name: str, spin_us: float) -> Engine:
    if name == "inline":
        from crossfade.engines.inline import InlineEngine

        return InlineEngine()
    from crossfade.engines.local import LocalEngine

    return LocalEngine(spin_us=spin_us)


def current() -> Session | None:
    """The running session. A forked child has none: the actors are its parent's."""
    session = _Holder.session
    return session if session is not None and session.pid == os.getpid() else None


def is_initialized() -> bool:
    """Whether a session is running."""
    return current() is not None


def require() -> Session:
    """The running session, started now if there is none."""
    with _Holder.lock:
        return current() or init()


def require_same(session_id: str, what: str) -> Session:
    """The running session, if the object belongs to it.

    Raises:
        SessionError: it belongs to another one.
    """
    session = current()
    if session is None or session.id != session_id:
        raise SessionError(
            f"{what} belongs to a session that is over", hint="make actors and graphs anew after crossfade.shutdown()"
        )
    return session


def shutdown(**_: Any) -> None:
    """Ends the session: graphs are torn down, actors stopped. Does nothing if there is none."""
    with _Holder.lock:
        session, _Holder.session = current(), None
    if session is not None:
        session.close()
        release_signal()


def _disown() -> None:
    """In a forked child: actors and graphs are the parent's, and using them here would break them there."""
    session, _Holder.session = _Holder.session, None
    _Holder.lock = threading.RLock()
    if session is not None:
        for graph in list(session.graphs):
            graph._disown()
        session.engine.disown()


os.register_at_fork(after_in_child=_disown)
atexit.register(shutdown)
