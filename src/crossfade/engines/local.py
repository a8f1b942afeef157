"""The local engine: each actor is a process of this host.

An actor's process is a fresh interpreter that runs our entry point on inherited descriptors; the user's main module is never
run again. Classes and arguments come by cloudpickle, modules are found on the driver's ``sys.path``. The control socket is one half
of a pair made before the start, so nothing listens anywhere and no file is left; its key comes through an inherited pipe.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crossfade.channels.values.codec import dump_in_band, hint_for_unpickling
from crossfade.engines import control
from crossfade.engines.communicators import entangled, refuse_entangled
from crossfade.engines.explained import explained
from crossfade.engines.local_plan import LocalPlan
from crossfade.engines.local_processes import SHUT_DOWN, AnyProcess, Processes
from crossfade.engines.protocol import ActorSpec, Places
from crossfade.engines.state import State
from crossfade.engines.unpicklable import CulpritNamed, arguments
from crossfade.errors import ActorStartError, Failure, GraphError, SessionError
from crossfade.host.doorbell import DEFAULT_SPIN_US, Doorbell
from crossfade.host.loop_bell import LoopBell
from crossfade.interrupted import brief, checkpoint, uninterrupted
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.types import DRIVER

_LEAVING_S = 30.0
"""How long compiling a graph with user-defined communicators waits for the actors to leave other graphs with such communicators,
which may take a while (an actor may still be loading torch), before it is refused."""


class _LocalCall:
    def __init__(self, processes: Processes, process: AnyProcess, number: int) -> None:
        self._processes = processes
        self._process = process
        self._number = number
        self._value: Any = None
        self._has_value = False
        self._lock = threading.RLock()  # a signal's handler may get the same result where its thread is getting it

    def is_done(self) -> bool:
        return self._has_value or self._number in self._process.replies or bool(self._process.fate.end)

    @uninterrupted
    def wait(self, timeout_s: float | None) -> bool:
        return self.is_done() or self._processes.await_reply(self._process, self.is_done, timeout_s)

    @uninterrupted
    def result(self) -> Any:
        with self._lock:
            if not self._has_value:
                reply = self._process.replies.get(self._number)
                if reply is not None:
                    value = reply.failure if reply.failure is not None else self._unpickled(reply.payload)
                    if not self._has_value:
                        self._value = value
                        self._has_value = True
                elif not self._has_value:
                    raise self._process.fate.error()
                self._process.replies.pop(self._number, None)  # not before: is_done looks for it
        return self._value

    def _unpickled(self, payload: bytes) -> Any:
        try:
            return pickle.loads(payload)
        except (Exception, SystemExit) as error:
            label = f"unpickling what {self._process.name} returned"
            return Failure.capture(error, actor=DRIVER, node=label, hint=hint_for_unpickling(error))

    @brief
    def __del__(self) -> None:
        self._process.awaited.discard(self._number)
        self._process.replies.pop(self._number, None)


class LocalEngine:
    """Runs actors as processes of this host.

    A process looks for work for ``spin_us`` before it sleeps. With ``log_to_driver`` the driver shows what actors print; otherwise
    they inherit its stdout and stderr. Actors are forked from a process that has imported the modules of ``preload``, if any.
    """

    name = "local"
    places_actors = False

    def __init__(
        self, *, spin_us: float = DEFAULT_SPIN_US, log_to_driver: bool = True, preload: tuple[str, ...] = ()
    ) -> None:
        self._numbers = itertools.count()
        self._plans: dict[int, LocalPlan] = {}
        self.processes = Processes(
            lambda: list(self._plans.values()), spin_us=spin_us, log_to_driver=log_to_driver, preload=preload
        )

    @property
    def doorbell(self) -> Doorbell:
        return self.processes.doorbell

    def start_actor(self, actor: ActorSpec) -> None:
        cls, args, kwargs = actor.cls, tuple(actor.args), dict(actor.kwargs)
        with explained(ActorStartError, f"actor {actor.name} could not be started"):
            things = ((f"class {cls.__name__}", cls), *arguments(f"the constructor of {cls.__name__}", args, kwargs))
            with CulpritNamed(things):  # before the process starts, since it may raise
                payload = dump_in_band((cls, args, kwargs))
            self._start(control.Create(actor.name, payload, actor.gpus), actor.options)

    def _start(self, first: control.Create, options: Mapping[str, Any]) -> None:
        """Starts an actor's process, whose first message this is. The session has looked after its ``options``."""
        self.processes.start(first.actor, first)

    def call(
        self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_returns: int = 1
    ) -> _LocalCall:
        process = self.processes.process(actor)
        number = next(self._numbers)
        with CulpritNamed(arguments(f"{actor}.{method}", args, kwargs)):
            payload = dump_in_band((tuple(args), dict(kwargs)))
        return self._ask(process, control.Call(number, method, payload, num_returns))

    def ask_topology(self, actor: str) -> _LocalCall:
        return self._ask(self.processes.process(actor), control.AskTopology(next(self._numbers)))

    @uninterrupted
    def _ask(self, process: AnyProcess, message: control.Call | control.AskTopology) -> _LocalCall:
        process.awaited.add(message.number)
        call = _LocalCall(self.processes, process, message.number)
        process.send(message)
        return call

    def places(self, actors: Sequence[str]) -> Places:
        return Places()

    def open(self, plan: Plan, calls: Mapping[str, Call], *, record: bool, debug: bool = False) -> LocalPlan:
        processes = self.processes
        for name in plan.programs:
            if name != DRIVER:
                processes.await_created(name)
        number = next(self._numbers)
        opened = LocalPlan(processes, number, plan, self._forget, record=record, debug=debug)
        if plan.communicators:
            processes.wait_until(lambda: not entangled(plan, self._plans_of(is_leaving=True)), _LEAVING_S)
        with processes.ending:
            if processes.is_closed:
                raise SessionError(f"the graph was not compiled: {SHUT_DOWN}")
            if plan.communicators:
                refuse_entangled(plan, self._plans_of())
            self._plans[number] = opened
        try:
            with explained(GraphError, "the graph was not compiled"):
                opened.open(calls)
            checkpoint()
        except BaseException:
            opened.leave()
            raise
        return opened

    def _plans_of(self, *, is_leaving: bool = False) -> list[Plan]:
        """Returns the open plans; with ``is_leaving`` only those that the actors were told to leave."""
        return [opened.plan for opened in list(self._plans.values()) if opened.is_leaving or not is_leaving]

    def _forget(self, number: int) -> None:
        self._plans.pop(number, None)

    def kill(self, actor: str) -> None:
        self.processes.kill(actor)

    @uninterrupted
    def has_ended(self, actor: str) -> bool:
        return self.processes.has_ended(actor)

    @uninterrupted
    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        return self.processes.wait_until(ready, timeout_s)

    def loop_bell(self) -> LoopBell:
        return LoopBell(self.doorbell)

    def look(self, timeout_s: float) -> State:
        actors = self.processes.look(timeout_s)
        return State(tuple(actors), {number: plan.rings() for number, plan in list(self._plans.items())})

    def disown(self) -> None:
        self.processes.disown()

    def close(self) -> None:
        self.processes.close(self._abandon)

    def _abandon(self) -> None:
        for plan in list(self._plans.values()):
            plan.abandon()
