"""The processes of actors, as the driver holds them: starting and ending them, and taking in what they send."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, TypeAlias

from crossfade.engines import control
from crossfade.engines.actor_process import ActorProcess, Start
from crossfade.engines.explained import explained
from crossfade.engines.far import FarHost, FarProcess
from crossfade.engines.forked import Forked, prepare
from crossfade.engines.interpreter import Interpreter
from crossfade.engines.output import Output, Pipes
from crossfade.engines.state import ActorState, Fate
from crossfade.errors import ActorError, SessionError
from crossfade.host.doorbell import Doorbell
from crossfade.host.frames import FrameError
from crossfade.host.interpreter import open_standard_streams
from crossfade.host.limits import allow_many_descriptors
from crossfade.host.processes import await_end, open_pidfd
from crossfade.interrupted import checkpoint
from crossfade.types import DRIVER

SHUT_DOWN = "the session was shut down"

_LAST_STEPS_S = 0.2  # how long an actor that has closed its socket may take to exit, so that its exit status tells why
_GRACE_S = 1.0

_ENDING_S = 1.0
"""How long the fault of one actor is held back for another actor that is ending, which may be the reason."""
_FAR_ENDING_S = 2.0
"""The same where actors are on other hosts, whose agents may not answer."""


AnyProcess: TypeAlias = ActorProcess | FarProcess


class Listener(Protocol):
    """A plan, which its actors' answers and ends concern."""

    def receive(self, actor: str, reply: control.OfPlan) -> None:
        """An actor has answered, or cannot continue a plan, which may be another one."""

    def lose(self, actor: str, error: ActorError) -> None:
        """An actor's process has ended."""


class Processes:
    """The actors' processes, and the doorbell at which the driver's threads wait for all of them.

    ``listeners`` returns the plans to tell of answers and ends. Actors that have ended leave ``living`` and keep their fate.
    """

    def __init__(
        self,
        listeners: Callable[[], Iterable[Listener]],
        *,
        spin_us: float,
        log_to_driver: bool,
        preload: tuple[str, ...] = (),
    ) -> None:
        allow_many_descriptors()
        self._listeners = listeners
        self.spin_us = spin_us
        self._preload = preload
        with explained(SessionError, "the session could not be started"), ExitStack() as undo:
            open_standard_streams()
            self.pidfd = open_pidfd(os.getpid())
            undo.callback(os.close, self.pidfd)
            self._output = Output() if log_to_driver else None
            if self._output is not None:
                undo.callback(self._output.close)
            self._bell_fds = Doorbell.create_fds(DRIVER)
            for fd in self._bell_fds:
                undo.callback(os.close, fd)
            self.doorbell = Doorbell(*self._bell_fds, spin_us=spin_us)
            if preload:
                prepare(preload)
            undo.pop_all()
        self.living: dict[str, AnyProcess] = {}  # by name
        self._fates: dict[str, Fate] = {}  # by name; of all actors
        self.is_closed = False
        self._closer = 0  # the thread that closes this, or 0
        self.ending = threading.RLock()  # held while an actor is buried, and while all are ended
        self._introducing = threading.RLock()
        self.far_hosts: dict[str, FarHost] = {}  # by name, as plans have it
        self.addresses: dict[str, str] = {}  # IP addresses of hosts, this one included, by name
        # Called with an actor that is asked for: an engine whose actors start elsewhere waits for it there.
        self.settle: Callable[[str], None] = lambda actor: None

    # Starting

    def start(self, actor: str, first: control.Create, start: Start | None = None) -> None:
        """Starts an actor's process, as a child of this one unless ``start`` finds another, and sends it its first message; does
        not wait for the constructor.
        """
        with Pipes(self._output if start is None else None) as pipes:
            process = ActorProcess(actor, self.pidfd, start or self._start_of(actor, pipes))
            try:
                self._take_on(process, pipes)
                process.send(first)
                checkpoint()
            except BaseException:
                self.living.pop(actor, None)
                self._fates.pop(actor, None)
                for fd in (process.connection.fileno(), process.pidfd):
                    self.doorbell.unwatch(fd)
                process.discard()
                raise

    def _start_of(self, actor: str, pipes: Pipes) -> Start:
        if self._preload:
            return partial(Forked, actor, self._preload, self.spin_us, pipes.for_child)
        return partial(Interpreter, actor, "crossfade.engines.serving", (self.spin_us,), pipes.for_child)

    def _take_on(self, process: ActorProcess, pipes: Pipes) -> None:
        """A process that has just started is one of ours, unless another thread has closed this meanwhile."""
        with self.ending:
            self._refuse_if_closed(process)
            control_fd = process.connection.fileno()
            process.on_message = lambda: self._received_early(process)
            process.on_room = lambda is_wanted: self.doorbell.watch_room(control_fd, is_wanted=is_wanted)
            self.doorbell.watch(control_fd, lambda: self._converse(process))
            pipes.follow(process.name, process.pid, process.pidfd)
            self.doorbell.watch(process.pidfd, lambda: self.ended(process))
            self._fates[process.name] = process.fate
            self.living[process.name] = process
            self._refuse_if_closed(process)  # a signal's handler may have closed it in the middle of this

    def _refuse_if_closed(self, process: AnyProcess) -> None:
        if self.is_closed:
            raise SessionError(f"actor {process.name} was not started: {SHUT_DOWN}")

    def process(self, actor: str) -> AnyProcess:
        """An actor that can take requests. Raises an `ActorError` for others."""
        self.settle(actor)
        process, fate = self.living.get(actor), self._fates[actor]
        if process is None or fate.is_over:
            raise fate.error()
        return process

    def await_created(self, actor: str) -> None:
        """Waits until an actor's constructor has returned. Raises an `ActorError` if it does not."""
        process = self.process(actor)
        self._catch_up([process])
        self.doorbell.wait_until(lambda: process.fate.is_created or process.fate.is_over)
        self.process(actor)

    def take_on_far(self, process: FarProcess) -> None:
        """An actor of another host is one of ours."""
        with self.ending:
            self._refuse_if_closed(process)
            self._fates[process.name] = process.fate
            self.living[process.name] = process

    def clock_offset_ns(self, host: str) -> int:
        """What the clock of a host shows more than this one's."""
        return self.far_hosts[host].offset_ns if host in self.far_hosts else 0

    # Sending

    def introduce(self, actor: str, peer: str) -> None:
        """Makes a peer's doorbell and process known to an actor, once."""
        process = self.here(actor)
        with self._introducing:  # a thread that finds the peer known must not overtake the one that makes it so
            if peer not in process.known:
                other = None if peer == DRIVER else self.here(peer)
                fds = (*self._bell_fds, self.pidfd) if other is None else (*other.bell_fds, other.pidfd)
                process.post(control.Introduce(peer), fds)
                process.known.add(peer)

    def here(self, actor: str) -> ActorProcess:
        """As `process`, for an actor of this host."""
        process = self.process(actor)
        if not isinstance(process, ActorProcess):
            raise ValueError(f"{actor} is on another host, where nobody is introduced by this process")
        return process

    def post(self, actor: str, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends a control message to an actor, without waiting for room; does nothing if the actor has ended."""
        process = self.living.get(actor)
        if process is not None:
            process.post(message, fds)

    def refuse_to_wait(self, actors: Sequence[str]) -> None:
        """Raises a `SessionError` in a signal's handler whose own thread is sending to a living actor, or receiving from it."""
        for actor in actors:
            process = self.living.get(actor)
            if process is not None and self.is_alive(actor):
                process.connection.refuse_to_wait()

    # Receiving

    def _converse(self, process: ActorProcess) -> None:
        """Handles an actor's socket: sends what was left unsent if there is room now, and takes in what has arrived."""
        if process.connection.has_unsent:
            process.flush()
        self._receive(process)

    def _receive(self, process: ActorProcess) -> None:
        with self.ending:  # another thread may be burying it
            if not process.fate.end:
                self._take_replies(process)

    def _take_replies(self, process: ActorProcess) -> None:
        try:
            while (message := process.connection.peek()) is not None:
                self.took(process, pickle.loads(message.payload))
                process.connection.drop(message)  # last: if interrupted before, the whole message is handled again
        except FrameError as error:
            if not process.refusal:
                process.break_off(error)
        if process.connection.is_closed:
            self.doorbell.unwatch(process.connection.fileno())
            if not (self.is_closed or process.fate.end or await_end(process.pidfd, _LAST_STEPS_S)):
                process.kill()  # it is not ending: it closed its socket, so it cannot be reached
                if process.is_borrowed:
                    self.ended(process)

    def took(self, process: AnyProcess, reply: Any) -> None:
        """Deals with one message of an actor's."""
        match reply:
            case control.Created():
                process.fate.is_created = reply.failure is None
                process.fate.start_failure = reply.failure
            case control.Returned():
                process.replies[reply.number] = reply
                if reply.number not in process.awaited:  # checked last: the reference may be dropped meanwhile
                    process.replies.pop(reply.number, None)
            case _:
                for listener in self._listeners():
                    listener.receive(process.name, reply)

    def _received_early(self, process: ActorProcess) -> None:
        self._receive(process)
        self.doorbell.nudge()

    def _catch_up(self, processes: Iterable[AnyProcess]) -> None:
        """Handles messages that were left when a signal's handler raised: unsent or received ones that no descriptor signals."""
        for process in processes:
            if isinstance(process, FarProcess):
                process.host.catch_up()
                continue
            if process.connection.has_unsent:
                process.flush()
            if process.connection.has_message:
                self._receive(process)

    def wait_until(self, ready: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Waits until ``ready()`` is true, which checks what the actors have sent; False if the time passed."""
        self._catch_up(list(self.living.values()))
        return self.doorbell.wait_until(ready, timeout_s)

    def await_reply(self, process: AnyProcess, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """As `wait_until`, for what one actor sends. Raises a `SessionError` in a handler that would wait for its own thread."""
        process.connection.refuse_to_wait()
        self._catch_up([process])
        return self.doorbell.wait_until(ready, timeout_s)

    def look(self, timeout_s: float) -> list[ActorState]:
        """What the actors are doing; those that answer within the time. Takes no lock."""
        asked = list(self.living.values())
        for process in asked:
            process.ask()
        deadline = time.monotonic() + timeout_s
        actors = [process.look(max(0.0, deadline - time.monotonic())) for process in asked]
        told = {actor.actor for actor in actors}
        return actors + [fate.obituary() for fate in list(self._fates.values()) if fate.end and fate.name not in told]

    # Ending

    def is_alive(self, actor: str) -> bool:
        """Whether an actor's process still runs, as far as is known."""
        return not self._fates[actor].end

    def end_of(self, actor: str) -> str:
        """How an actor's process ended."""
        return self._fates[actor].end

    def has_ended(self, actor: str) -> bool:
        """Whether an actor is gone, or could not be started. Finds deaths that no thread has waited for."""
        self.doorbell.pump()
        fate = self._fates.get(actor)
        return fate is None or fate.is_over

    def hear(self) -> None:
        """Takes in what has come until now: when this returns, plans know of deaths and faults that were to be known before."""
        self.doorbell.pump()
        with self.ending:  # another thread may be telling them
            pass

    def bury_ending(self, actors: Sequence[str]) -> None:
        """Waits for those actors that are ending: when this returns, plans know of deaths that others may have noticed by now."""
        deadline = time.monotonic() + _ENDING_S
        far = [process for actor in actors if isinstance(process := self.living.get(actor), FarProcess)]
        told = [host.ask_ends() for host in {process.host for process in far}]
        if told:
            self.doorbell.wait_until(
                lambda: any(process.fate.end for process in far) or all(is_told() for is_told in told), _FAR_ENDING_S
            )
        for process in [found for actor in actors if (found := self.living.get(actor))]:
            with self.ending:
                if process.fate.end or not process.await_ending(deadline - time.monotonic()):
                    continue
                self._bury(process)
            self.doorbell.nudge()  # see `kill`

    def ended(self, process: AnyProcess) -> None:
        """An actor's process has ended."""
        with self.ending:
            if self.living.get(process.name) is process:
                self._bury(process)

    def _bury(self, process: AnyProcess) -> None:
        """Tells all plans of an actor's end, then forgets the actor. If interrupted, it runs again: the pidfd stays watched."""
        if not process.fate.end:
            if isinstance(process, ActorProcess):
                self._take_replies(process)  # its last messages
            process.fate.end = process.describe_end(process.await_exit())
        for listener in self._listeners():
            listener.lose(process.name, process.fate.error())
        if isinstance(process, ActorProcess):
            self.doorbell.unwatch(process.connection.fileno())
            self.doorbell.unwatch(process.pidfd)
        process.close()
        self.living.pop(process.name, None)
        for other in list(self.living.values()):
            other.known.discard(process.name)  # the next one of that name is another process

    def kill(self, actor: str) -> None:
        process = self.living.get(actor)
        if process is not None:
            process.kill()
            process.await_exit()
            self.ended(process)
            self.doorbell.nudge()  # our taking its descriptors out may have kept them from waking a thread

    def disown(self) -> None:
        """This process was forked: the actors are its parent's."""
        for process in self.living.values():
            process.disown()
        if self._output is not None:
            self._output.disown()

    def close(self, abandon: Callable[[], None]) -> None:
        """Ends everything, after ``abandon()``. Actors are asked to stop, and killed if they do not within a second. Idempotent."""
        with self.ending:
            if self._closer not in (0, threading.get_ident()) or self.pidfd < 0:
                return  # another thread is closing it, or has closed it
            self._closer = threading.get_ident()
            self.is_closed = True
        try:
            abandon()
            self._close()
        finally:
            self._closer = 0

    def _close(self) -> None:
        """Ends all actors and closes all descriptors. May be called again after an interrupt at any point."""
        for host in list(self.far_hosts.values()):
            host.close()  # which ends its actors
            for far in host.processes.values():
                far.fate.end = far.fate.end or SHUT_DOWN
        alive = [process for process in self.living.values() if isinstance(process, ActorProcess)]
        for process in alive:
            process.connection.hang_up()  # a message would wait behind what another thread is sending
            process.bell.announce_mail()
        deadline = time.monotonic() + _GRACE_S
        with self.ending:  # another thread may find out that they end, and bury them
            for process in alive:
                if not process.fate.end:
                    if not process.is_borrowed and not await_end(process.pidfd, deadline - time.monotonic()):
                        process.kill()
                    process.await_exit()
                    process.fate.end = SHUT_DOWN
        self.doorbell.nudge()
        for living in list(self.living.values()):
            living.close()
        self.doorbell.close()
        if self._output is not None:
            self._output.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
