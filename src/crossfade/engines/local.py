"""The local engine: each actor is a process of this host.

An actor's process is a fresh interpreter that runs our entry point on inherited descriptors; the user's main module is never
run again. Classes and arguments come by cloudpickle, modules are found on the driver's ``sys.path``. The control socket is one half
of a pair made before the start, so nothing listens anywhere and no file is left; its key comes through an inherited pipe.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from crossfade.channels.values.codec import hint_for_unpickling
from crossfade.engines import control
from crossfade.engines.actor_process import ActorProcess
from crossfade.engines.communicators import entangled, refuse_entangled
from crossfade.engines.control import dump_user
from crossfade.engines.explained import explained
from crossfade.engines.fate import Fate
from crossfade.engines.local_plan import LocalPlan
from crossfade.engines.output import Output, Pipes
from crossfade.engines.state import State
from crossfade.engines.unpicklable import CulpritNamed, arguments
from crossfade.errors import ActorError, ActorStartError, Failure, GraphError, SessionError
from crossfade.host.doorbell import DEFAULT_SPIN_US, Bell, Doorbell
from crossfade.host.frames import FrameError
from crossfade.host.limits import allow_many_descriptors
from crossfade.host.loop_bell import LoopBell
from crossfade.host.processes import await_end, open_pidfd
from crossfade.interrupted import brief, checkpoint, uninterrupted
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.types import DRIVER

__all__ = ["LocalEngine"]

_SHUT_DOWN = "the session was shut down"

_LAST_STEPS_S = 0.2
"""So long an actor that has hung up may take to exit, so that it is said why it did."""

_GRACE_S = 1.0

_LEAVING_S = 30.0
"""How long compiling a graph with user-defined communicators waits for the actors to leave other graphs with such communicators,
which may take a while (an actor may still be loading torch), before it is refused."""

_ENDING_S = 1.0
"""So long a fault of one actor is held back for another one that is on its way out, and may be the reason."""


class _LocalCall:
    """An ordinary call under way."""

    def __init__(self, engine: LocalEngine, process: ActorProcess, number: int) -> None:
        self._engine = engine
        self._process = process
        self._number = number
        self._value: Any = None
        self._has_value = False
        self._lock = threading.RLock()  # a signal's handler may get the same result where its thread is getting it

    def is_done(self) -> bool:
        """See the protocol."""
        return self._has_value or self._number in self._process.replies or bool(self._process.fate.end)

    @uninterrupted
    def wait(self, timeout_s: float | None) -> bool:
        """See the protocol."""
        if self.is_done():
            return True
        connection = self._process.connection
        connection.refuse_to_wait()
        self._engine.catch_up([self._process])
        return self._engine.doorbell.wait_until(self.is_done, timeout_s)

    @uninterrupted
    def result(self) -> Any:
        """See the protocol."""
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

    Args:
        spin_us: how long a process looks for work before it sleeps.
        log_to_driver: the driver shows what actors print; otherwise they inherit its stdout and stderr.
    """

    name = "local"

    def __init__(self, *, spin_us: float = DEFAULT_SPIN_US, log_to_driver: bool = True) -> None:
        allow_many_descriptors()
        self._spin_us = spin_us
        with explained(SessionError, "the session could not be started"), ExitStack() as undo:
            self.pidfd = open_pidfd(os.getpid())
            undo.callback(os.close, self.pidfd)
            self._output = Output() if log_to_driver else None
            if self._output is not None:
                undo.callback(self._output.close)
            self.bell_fds = Doorbell.create_fds(DRIVER)
            for fd in self.bell_fds:
                undo.callback(os.close, fd)
            self.doorbell = Doorbell(*self.bell_fds, spin_us=spin_us)
            undo.pop_all()
        self._processes: dict[str, ActorProcess] = {}  # by name; those that have not ended
        self._fates: dict[str, Fate] = {}  # by name; of all actors
        self._numbers = itertools.count()
        self._plans: dict[int, LocalPlan] = {}
        self._is_closed = False
        self._closer = 0  # the thread that closes the engine, or 0
        self._ending = threading.RLock()
        self._introducing = threading.RLock()

    def start_actor(
        self, actor: str, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], gpus: tuple[int, ...] = ()
    ) -> None:
        """See the protocol."""
        with explained(ActorStartError, f"actor {actor} could not be started"):
            things = ((f"class {cls.__name__}", cls), *arguments(f"the constructor of {cls.__name__}", args, kwargs))
            with CulpritNamed(things):
                payload = dump_user((cls, tuple(args), dict(kwargs)))  # before the process starts, since it may raise
            with Pipes(self._output) as pipes:
                process = ActorProcess(actor, self._spin_us, self.pidfd, pipes)
                try:
                    self._take_on(process, pipes)
                    process.send(control.Create(actor, self._spin_us, payload, gpus))
                    checkpoint()
                except BaseException:
                    self._processes.pop(actor, None)
                    self._fates.pop(actor, None)
                    for fd in (process.connection.fileno(), process.pidfd):
                        self.doorbell.unwatch(fd)
                    process.discard()
                    raise

    def _take_on(self, process: ActorProcess, pipes: Pipes) -> None:
        """A process that has just started is one of ours, unless another thread has closed the engine meanwhile."""
        with self._ending:
            self._refuse_if_closed(process)
            control_fd = process.connection.fileno()
            process.on_message = lambda: self._received_early(process)
            process.on_room = lambda is_wanted: self.doorbell.watch_room(control_fd, is_wanted=is_wanted)
            self.doorbell.watch(control_fd, lambda: self._converse(process))
            pipes.follow(process.name, process.popen.pid, process.pidfd)
            self.doorbell.watch(process.pidfd, lambda: self._ended(process))
            self._fates[process.name] = process.fate
            self._processes[process.name] = process
            self._refuse_if_closed(process)  # a signal's handler may have closed it in the middle of this

    def _refuse_if_closed(self, process: ActorProcess) -> None:
        if self._is_closed:
            raise SessionError(f"actor {process.name} was not started: {_SHUT_DOWN}")

    def _process(self, actor: str) -> ActorProcess:
        process, fate = self._processes.get(actor), self._fates[actor]
        if process is None or fate.is_over:
            raise fate.error()
        return process

    def _converse(self, process: ActorProcess) -> None:
        """Handles an actor's socket: sends what was left unsent if there is room now, and takes in what has arrived."""
        if process.connection.has_unsent:
            process.flush()
        self._receive(process)

    def _receive(self, process: ActorProcess) -> None:
        """Takes in what an actor has sent."""
        with self._ending:  # another thread may be burying it
            if not process.fate.end:
                self._take_replies(process)

    def _take_replies(self, process: ActorProcess) -> None:
        try:
            self._take_in(process)
        except FrameError as error:
            if not process.refusal:
                process.break_off(error)
        if process.connection.is_closed:
            self.doorbell.unwatch(process.connection.fileno())
            if not (self._is_closed or process.fate.end or await_end(process.pidfd, _LAST_STEPS_S)):
                process.kill()  # it is not ending: it closed its socket, so it cannot be reached

    def _take_in(self, process: ActorProcess) -> None:
        while (message := process.connection.peek()) is not None:
            reply = pickle.loads(message.payload)
            match reply:
                case control.Created():
                    process.fate.is_created = reply.failure is None
                    process.fate.start_failure = reply.failure
                case control.Returned():
                    process.replies[reply.number] = reply
                    if (
                        reply.number not in process.awaited
                    ):  # looked at afterwards: the reference may be dropped meanwhile
                        process.replies.pop(reply.number, None)
                case control.Opened() | control.Closed() | control.Reported() | control.Faulted():
                    for plan in list(self._plans.values()):
                        plan.receive(process.name, reply)
            process.connection.drop(message)  # last: if interrupted before this, the whole message is handled again

    def _received_early(self, process: ActorProcess) -> None:
        self._receive(process)
        self.doorbell.nudge()

    def catch_up(self, processes: Sequence[ActorProcess]) -> None:
        """Handles messages that were left when a signal's handler raised: unsent or received ones that no descriptor signals."""
        for process in processes:
            if process.connection.has_unsent:
                process.flush()
            if process.connection.has_message:
                self._receive(process)

    def _ended(self, process: ActorProcess) -> None:
        """An actor's process has ended."""
        with self._ending:
            if process.name in self._processes:
                self._bury(process)

    def _bury(self, process: ActorProcess) -> None:
        """Tells all plans of an actor's end, then forgets the actor. If interrupted, it runs again: the pidfd stays watched."""
        if not process.fate.end:
            self._take_replies(process)  # its last messages
            process.fate.end = process.describe_end(process.await_exit())
        for plan in list(self._plans.values()):
            plan.lose(process.name, process.fate.error())
        self.doorbell.unwatch(process.connection.fileno())
        self.doorbell.unwatch(process.pidfd)
        process.close()
        self._processes.pop(process.name, None)

    def call(
        self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_returns: int = 1
    ) -> _LocalCall:
        """See the protocol."""
        process = self._process(actor)
        number = next(self._numbers)
        with CulpritNamed(arguments(f"{actor}.{method}", args, kwargs)):
            payload = dump_user((tuple(args), dict(kwargs)))
        return self._ask(process, control.Call(number, method, payload, num_returns))

    def ask_topology(self, actor: str) -> _LocalCall:
        """See the protocol."""
        return self._ask(self._process(actor), control.AskTopology(next(self._numbers)))

    @uninterrupted
    def _ask(self, process: ActorProcess, message: control.Call | control.AskTopology) -> _LocalCall:
        process.awaited.add(message.number)
        call = _LocalCall(self, process, message.number)
        process.send(message)
        return call

    def open(self, plan: Plan, calls: Mapping[str, Call], *, record: bool, debug: bool = False) -> LocalPlan:
        """See the protocol."""
        actors = [name for name in plan.programs if name != DRIVER]
        for name in actors:
            self._await_created(name)
        number = next(self._numbers)
        opened = LocalPlan(self, number, plan, record=record, debug=debug)
        if plan.communicators:
            self.await_answers(lambda: not entangled(plan, self._plans_of(is_leaving=True)), _LEAVING_S)
        with self._ending:
            if self._is_closed:
                raise SessionError(f"the graph was not compiled: {_SHUT_DOWN}")
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

    def _await_created(self, actor: str) -> None:
        process = self._process(actor)
        self.catch_up([process])
        self.doorbell.wait_until(lambda: process.fate.is_created or process.fate.is_over)
        self._process(actor)

    def introduce(self, actor: str, peer: str) -> None:
        """Makes a peer's doorbell and process known to an actor, once."""
        process = self._process(actor)
        with self._introducing:  # a thread that finds the peer known must not overtake the one that makes it so
            if peer not in process.known:
                other = None if peer == DRIVER else self._process(peer)
                fds = (*self.bell_fds, self.pidfd) if other is None else (*other.bell_fds, other.pidfd)
                process.post(control.Introduce(peer), fds)
                process.known.add(peer)

    def post(self, actor: str, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends a control message to an actor, without waiting for room; does nothing if the actor has ended."""
        process = self._processes.get(actor)
        if process is not None:
            process.post(message, fds)

    def refuse_to_wait(self, actors: Sequence[str]) -> None:
        """Raises a `SessionError` in a signal's handler whose own thread is sending to a living actor, or receiving from it."""
        for actor in actors:
            process = self._processes.get(actor)
            if process is not None and self.is_alive(actor):
                process.connection.refuse_to_wait()

    def bell(self, actor: str) -> Bell:
        """Returns an actor's doorbell.

        Raises:
            ActorError: the actor has ended.
        """
        return self._process(actor).bell

    def hear(self) -> None:
        """Takes in what has come until now: when this returns, plans know of deaths and faults that were to be known before."""
        self.doorbell.pump()
        with self._ending:  # another thread may be telling them
            pass

    def bury_ending(self, actors: Sequence[str]) -> None:
        """Plans know of the deaths that others may have noticed by now, when this returns. Waits for those who are ending."""
        deadline = time.monotonic() + _ENDING_S
        for process in [found for actor in actors if (found := self._processes.get(actor))]:
            with self._ending:
                if process.fate.end or not process.await_ending(deadline - time.monotonic()):
                    continue
                self._bury(process)
            self.doorbell.nudge()  # see `kill`

    def is_alive(self, actor: str) -> bool:
        """Whether an actor's process still runs, as far as is known."""
        return not self._fates[actor].end

    @uninterrupted
    def has_ended(self, actor: str) -> bool:
        """See the protocol."""
        self.doorbell.pump()  # deaths that nobody has waited for
        fate = self._fates.get(actor)
        return fate is None or fate.is_over

    @uninterrupted
    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """See the protocol."""
        self.catch_up(list(self._processes.values()))
        return self.doorbell.wait_until(ready, timeout_s)

    def error_of(self, actor: str) -> ActorError:
        """What became of an actor that is not alive."""
        return self._fates[actor].error()

    def await_answers(self, is_complete: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Waits until answers have come in; False if the time passed."""
        self.catch_up(list(self._processes.values()))
        return self.doorbell.wait_until(is_complete, timeout_s)

    def loop_bell(self) -> LoopBell:
        """See the protocol."""
        return LoopBell(self.doorbell)

    def look(self, timeout_s: float) -> State:
        """See the protocol."""
        asked = list(self._processes.values())
        for process in asked:
            process.side_door.ask()
        deadline = time.monotonic() + timeout_s
        actors = [process.look(max(0.0, deadline - time.monotonic())) for process in asked]
        told = {actor.actor for actor in actors}
        actors += [fate.obituary() for fate in list(self._fates.values()) if fate.end and fate.name not in told]
        return State(tuple(actors), {number: plan.rings() for number, plan in list(self._plans.items())})

    def disown(self) -> None:
        """See the protocol."""
        for process in self._processes.values():
            process.disown()
        if self._output is not None:
            self._output.disown()

    def _plans_of(self, *, is_leaving: bool = False) -> list[Plan]:
        """Returns the open plans; with ``is_leaving`` only those that the actors were told to leave."""
        return [opened.plan for opened in list(self._plans.values()) if opened.is_leaving or not is_leaving]

    def forget(self, number: int) -> None:
        """A plan is closed."""
        self._plans.pop(number, None)

    def kill(self, actor: str) -> None:
        """See the protocol."""
        process = self._processes.get(actor)
        if process is not None:
            process.kill()
            process.await_exit()
            self._ended(process)
            self.doorbell.nudge()  # our taking its descriptors out may have kept them from waking a thread

    def close(self) -> None:
        """See the protocol. Actors are asked to stop, and killed if they do not within a second."""
        with self._ending:
            if self._closer not in (0, threading.get_ident()) or self.pidfd < 0:
                return  # another thread is closing it, or has closed it
            self._closer = threading.get_ident()
            self._is_closed = True
        try:
            self._close()
        finally:
            self._closer = 0

    def _close(self) -> None:
        """Ends all plans, actors and descriptors. May be called again after an interrupt at any point."""
        for plan in list(self._plans.values()):
            plan.abandon()
        alive = list(self._processes.values())
        for process in alive:
            process.connection.hang_up()  # a Stop message would wait behind what another thread is sending
            process.bell.announce_mail()
        deadline = time.monotonic() + _GRACE_S
        with self._ending:  # another thread may find out that they end, and bury them
            for process in alive:
                if not process.fate.end:
                    if not await_end(process.pidfd, deadline - time.monotonic()):
                        process.kill()
                    process.await_exit()
                    process.fate.end = _SHUT_DOWN
        self.doorbell.nudge()
        for process in list(self._processes.values()):
            process.close()
        self.doorbell.close()
        if self._output is not None:
            self._output.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
