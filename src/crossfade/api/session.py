"""The session: which engine runs the actors of this program, from ``init`` (or the first actor) to ``shutdown``."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
import threading
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from crossfade.api.accepted import RAY_INIT_OPTIONS, check_names, module_names
from crossfade.api.booking import CPU, GPU, Ledger, amounts
from crossfade.api.signals import release_signals, take_signals
from crossfade.engines.machine import num_usable_cores, num_visible_gpus
from crossfade.engines.protocol import DEFAULT_SPIN_US
from crossfade.errors import SessionError
from crossfade.interrupted import uninterrupted

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from crossfade.engines.protocol import Engine, OpenPlan
    from crossfade.graph.nodes import ActorInfo
    from crossfade.topology import Topology

_ENGINES = ("local", "inline", "ray")
_OPTIONS = ("engine", "spin_us", "num_cpus", "num_gpus", "resources", "log_to_driver", "preload", "ignore_reinit_error")


class EndsWithSession(Protocol):
    """The executions of a graph, as the session uses them."""

    def abandon(self) -> None:
        """The session ends."""

    def disown(self) -> None:
        """This process was forked: the graph is its parent's."""


class KeepsExecutions(Protocol):
    """What lives as long as a graph, or a reference to a result of it that is still to come."""

    @property
    def executions(self) -> EndsWithSession:
        """The graph's."""


class Watch(Protocol):
    """An event loop that waits for results."""

    def end(self) -> None:
        """The session is over: all tasks that wait are notified. Called in any thread."""


class Session:
    """Everything between one ``init`` and its ``shutdown``."""

    def __init__(self, engine: Engine, totals: Mapping[str, float] | None = None) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.pid = os.getpid()
        self.engine = engine
        self.is_over = False
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        # of these graphs, and of dropped ones whose results are still to come.
        self.keepers: weakref.WeakSet[KeepsExecutions] = weakref.WeakSet()
        # open plans whose graph, and the references to its results, were dropped without a teardown.
        self.orphans: deque[OpenPlan] = deque()
        self.actors: dict[str, ActorInfo] = {}  # what is known of each actor, the dead ones included, by id
        # what waits for results in an event loop, by loop. Under ``watches_lock``.
        self.watches: weakref.WeakKeyDictionary[AbstractEventLoop, Watch] = weakref.WeakKeyDictionary()
        self.watches_lock = threading.RLock()  # a signal's handler may end the session where its thread has it
        # the host's GPUs and how they are linked, once an actor has told; see `crossfade.api.links`.
        self.links: Topology | None = None
        self._ledger = Ledger(totals or {})
        self._names: set[str] = set()  # ids that were given out
        self._ids: dict[str, str] = {}  # of actors that the user named, by name
        self._counters: dict[str, itertools.count[int]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Session(engine={self.engine.name!r}, actors started: {len(self.actors)}{', over' * self.is_over})"

    def enter_actor(
        self, class_name: str, asked: str | None, booked: Mapping[str, float]
    ) -> tuple[str, tuple[int, ...]]:
        """An id for a new actor, for which ``booked`` is set aside: the asked name, else the class's with a number. Also the
        indices of its GPUs.

        A name is free again once its actor has died; the next one of that name has the id ``name-2``.
        """
        with self._lock:
            holder = self._ids.get(asked) if asked is not None else None
            if holder is not None and not self.engine.has_ended(holder):
                raise SessionError(
                    f"there is an actor named {asked!r} already", hint="give it another name in options(name=...)"
                )
            actor = self._new_id(class_name, asked)
            if booked:
                self._ledger.give_back_if(self._is_gone)
                self._ledger.book(actor, booked)
            self._names.add(actor)
            if asked is not None:
                self._ids[asked] = actor
            return actor, self._ledger.gpus(actor)

    def _is_gone(self, actor: str) -> bool:
        """Whether an actor has ended; one that another thread is about to start has not."""
        return actor in self.actors and self.engine.has_ended(actor)

    def _new_id(self, class_name: str, asked: str | None) -> str:
        if asked is not None:
            names: Iterator[str] = itertools.chain((asked,), (f"{asked}-{n}" for n in itertools.count(2)))
        else:
            counter = self._counters.setdefault(class_name, itertools.count())
            names = (f"{class_name}{n}" for n in counter)
        return next(name for name in names if name not in self._names)

    def forget_actor(self, actor: str, asked: str | None) -> None:
        """The actor could not be started: its name, and what it holds, are free again."""
        with self._lock:
            self._names.discard(actor)
            self._ledger.give_back(actor)
            if asked is not None:
                self._ids.pop(asked, None)

    def find_actor(self, name: str) -> ActorInfo | None:
        """The living actor of that name: one that the user gave, or the id that plans and errors show."""
        actor = self._ids.get(name, name)
        info = self.actors.get(actor)
        return None if info is None or self.engine.has_ended(actor) else info

    def bury_orphans(self) -> None:
        """Takes the plans of dropped graphs from their actors."""
        while self.orphans:
            opened = self.orphans.popleft()
            try:
                opened.leave()
            except BaseException:
                self.orphans.append(opened)
                raise

    def close(self) -> None:
        """Tears all graphs down and ends all actors. May be called again after an interrupt."""
        self.is_over = True
        watches: list[Watch] = []
        try:
            for keeper in self._all_keepers():
                keeper.executions.abandon()
            with self.watches_lock:
                watches = list(self.watches.values())
            self.engine.close()
        finally:
            for watch in watches:  # now that everything has its end, so that no task keeps waiting for it
                watch.end()

    def _all_keepers(self) -> list[KeepsExecutions]:
        while True:
            try:
                return list(self.keepers)
            except RuntimeError:  # another thread has compiled a graph in the middle of this
                continue


class _Holder:
    session: Session | None = None
    lock = threading.RLock()
    parents: frozenset[str] = frozenset()  # sessions of the processes that this one was forked from


@uninterrupted
def init(
    address: str | None = None,
    *,
    engine: str | None = None,
    spin_us: float = DEFAULT_SPIN_US,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    log_to_driver: bool = True,
    preload: str | Sequence[str] | None = None,
    ignore_reinit_error: bool = False,
    **ignored: Any,
) -> Session:
    """Starts a session. The first actor starts one by itself, so this is needed only to choose.

    Args:
        address: of a Ray cluster, for ``ray``; for others None or ``local``, which mean this machine, and ``auto``, which does so
            with a warning: no cluster is looked for.
        engine: ``local`` runs each actor as a process of this host; ``ray`` runs them in the workers of a Ray cluster, which is
            started unless the program has called ``ray.init()``; ``inline`` runs all of them in this thread, deterministically,
            for tests and debuggers. By default ``ray`` after ``ray.init()``, else ``local``.
        spin_us: how long, in microseconds, a process that waits looks for work (yielding its core) before it sleeps. 0 sleeps at
            once, which suits machines with more processes than cores and calls that are far apart.
        num_cpus: how many CPUs actors may book; by default the cores that this process may use.
        num_gpus: how many GPUs actors may book; by default those that this process may use. They are numbered as CUDA numbers
            them in this process and, as they inherit its environment, in actors.
        resources: how much of what else actors may book, by names of your own.
        log_to_driver: show what actors print, each line with the actor's name and process id. Otherwise they inherit the driver's
            stdout and stderr.
        preload: names of modules, such as ``torch``. Actors are forked from a process that has imported them, instead of being new
            interpreters that import them one by one. That process stays until the program ends, for its later sessions as well.
            Only ``local`` does this: ``inline`` has this process's modules, and Ray starts its workers itself. By default what the
            environment variable ``CROSSFADE_PRELOAD`` says, names with commas between them.
        ignore_reinit_error: return the running session instead of raising.
        **ignored: options of Ray's, such as ``namespace`` and ``logging_level``, which decide nothing but where Ray is started.

    Raises:
        SessionError: there is a session already.
        TypeError: an unknown option, or modules to preload that are no strings.
        ValueError: no such engine, an address elsewhere, an amount or a time below 0, or what cannot be a module's name.
    """
    if engine is None:
        engine = "ray" if _has_ray() else "local"
    rays = ("runtime_env",) if engine == "ray" else ()
    check_names(ignored, _OPTIONS, (*RAY_INIT_OPTIONS, *rays), "option of init")
    if engine not in _ENGINES:
        raise ValueError(f"unknown engine {engine!r}\nhint: one of {', '.join(_ENGINES)}")
    if engine != "ray" and address not in (None, "local", "auto"):
        raise ValueError(f"the address is {address!r}\nhint: leave it out; actors run on this machine")
    if not (isinstance(spin_us, Real) and math.isfinite(spin_us) and spin_us >= 0):
        raise ValueError(f"spin_us is {spin_us!r}\nhint: it is microseconds, 0 or more")
    asked = amounts(num_cpus, num_gpus, resources)
    modules = module_names(preload)
    with _Holder.lock:
        running = current()
        if running is not None:
            if ignore_reinit_error:
                return running
            raise SessionError("crossfade is initialised already", hint="call crossfade.shutdown() first")
        if address == "auto" and engine != "ray":
            warnings.warn(
                f"address='auto' looks for no cluster with the engine {engine!r}: actors run on this machine\n"
                "hint: engine='ray' runs them on a Ray cluster; else leave the address out",
                stacklevel=3,  # behind ``uninterrupted``
            )
        take_signals()
        _finish()
        totals = {
            **asked,
            CPU: num_usable_cores() if num_cpus is None else num_cpus,
            GPU: num_visible_gpus() if num_gpus is None else num_gpus,
        }
        rays_options = {**ignored, "address": address, "log_to_driver": log_to_driver, "resources": resources}
        rays_options |= {CPU: num_cpus, GPU: num_gpus}
        _Holder.session = Session(_make_engine(engine, spin_us, log_to_driver, modules, rays_options), totals)
        return _Holder.session


def _has_ray() -> bool:
    """Whether this program has started Ray; one that has not imported it has not."""
    if sys.modules.get("ray") is None:
        return False
    from crossfade.engines.ray import is_running

    return is_running()


def _make_engine(
    name: str,
    spin_us: float,
    log_to_driver: bool = True,
    preload: tuple[str, ...] = (),
    rays_options: Mapping[str, Any] = MappingProxyType({}),
) -> Engine:
    if name == "inline":
        from crossfade.engines.inline import InlineEngine

        return InlineEngine()
    if name == "ray":
        from crossfade.engines.ray import RayEngine, start_ray

        owns_ray = start_ray({name: value for name, value in rays_options.items() if value is not None})
        return RayEngine(spin_us=spin_us, owns_ray=owns_ray)
    from crossfade.engines.local import LocalEngine

    return LocalEngine(spin_us=spin_us, log_to_driver=log_to_driver, preload=preload)


def current() -> Session | None:
    """The running session. A forked child has none: the actors are its parent's."""
    session = _Holder.session
    return session if session is not None and session.pid == os.getpid() and not session.is_over else None


def is_initialized() -> bool:
    """Whether a session is running."""
    return current() is not None


def require() -> Session:
    """The running session, started now if there is none."""
    with _Holder.lock:
        return current() or init()


def require_same(session_id: str, what: str) -> Session:
    """The running session, if the object belongs to it; raises a `SessionError` if not."""
    session = current()
    if session is None or session.id != session_id:
        if session_id in _Holder.parents:
            raise SessionError(
                f"{what} belongs to the process that this one was forked from", hint="make actors and graphs anew here"
            )
        raise SessionError(
            f"{what} belongs to a session that is over", hint="make actors and graphs anew after crossfade.shutdown()"
        )
    return session


@uninterrupted
def shutdown(**_: Any) -> None:
    """Ends the session: tears graphs down and stops actors. Does nothing if there is no session. If Ctrl-C interrupts this, the
    session is over, and another call ends what is left of it.
    """
    if _finish():
        release_signals()


def _finish() -> bool:
    """Ends the session, or what an interrupt has left of it. False if there was none."""
    session = _Holder.session
    if session is None or session.pid != os.getpid():
        return False
    session.close()
    with _Holder.lock:
        if _Holder.session is session:
            _Holder.session = None
    return True


def _disown() -> None:
    """In a forked child: actors and graphs are the parent's, and using them here would break them there."""
    session, _Holder.session = _Holder.session, None
    _Holder.lock = threading.RLock()
    if session is not None:
        _Holder.parents |= {session.id}
        for keeper in list(session.keepers):
            keeper.executions.disown()
        session.engine.disown()


def _end_templates() -> None:
    forked = sys.modules.get("crossfade.engines.forked")
    if forked is not None:
        forked.end_templates()


os.register_at_fork(after_in_child=_disown)
atexit.register(_end_templates)  # runs last, when no actor needs them
atexit.register(shutdown)
