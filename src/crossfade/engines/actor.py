"""The process of one actor: it obeys plans and answers calls, all on its main thread."""

from __future__ import annotations

import errno
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from crossfade.channels.values.codec import dump_in_band
from crossfade.channels.wires import Wires
from crossfade.edges.life import Event
from crossfade.engines import control
from crossfade.engines.actor_part import Part, PartOpener
from crossfade.engines.control import send
from crossfade.engines.driver import channel_statistics
from crossfade.engines.exchanges import Exchanges
from crossfade.engines.explained import explained, fault_text
from crossfade.engines.protocol import ActorStatistics, method_of
from crossfade.engines.rendezvous import Rendezvous
from crossfade.engines.sentinel import all_stacks
from crossfade.engines.state import ActorState, PartState
from crossfade.engines.unpicklable import NotUnpickled, pickled_result
from crossfade.errors import ChannelError, DeviceError, Failure
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.limits import with_reserve
from crossfade.host.memory import Memory
from crossfade.host.sockets import Connection
from crossfade.interrupted import breathe
from crossfade.plan.actions import Verb
from crossfade.runtime.cursor import idle_of
from crossfade.runtime.run import returns

if TYPE_CHECKING:
    from crossfade.engines.actor_devices import ActorDevices

_SERVE_S: Final = 0.001  # how often to look after devices while something is to be done that no doorbell tells of

_ALL_TURNS: Final = 32
"""In every so many turns all parts are looked at, also those that seem to have nothing to do: their channels may have ended."""

_WAITS_PER_BREATH: Final = 16
"""Waits between two calls of `breathe`. Signal handlers also run while a method computes in Python, and during a sleep."""


class Actor:
    """The actor's side of everything."""

    def __init__(self, connection: Connection, doorbell: Doorbell, instance: Any = None) -> None:
        self._connection = connection
        self._doorbell = doorbell
        self._bells: dict[str, Bell] = {}
        self._pidfds: dict[str, int] = {}
        self._gone: set[str] = set()  # peers that have died
        self._parts: dict[int, Part] = {}
        self._running: list[Part] = []  # the parts whose cursors can move
        self.name = ""  # until it was made
        self._instance: Any = instance  # made by somebody else, or None until `control.Create` comes
        self._has_mail = False
        self._num_turns = 0
        self._first_reserved = 0  # a descriptor: the first of the reserve, when the last message came
        self._is_stopped = False
        self.is_forked = False
        self._devices: ActorDevices | None = None
        self._exchanges = Exchanges()
        self._rendezvous: dict[int, Rendezvous] = {}  # by plan, where peers on other hosts connect
        self._wires: dict[int, Wires] = {}  # by plan, its connections with other hosts
        self.look_after: Callable[[Callable[[], str]], None] = lambda failure: None  # see `Sentinel.look_after`
        self._gpus: tuple[int, ...] = ()
        self._doing = ""  # what is not an action of a plan
        _joined.append(self)
        doorbell.watch(connection.fileno(), self._mail_came)

    def serve(self) -> None:
        """Runs until told to stop or until the driver is gone."""
        doorbell, turn, num_waits = self._doorbell, self._turn, 0
        while not self._is_stopped:
            if num_waits % _WAITS_PER_BREATH == 0:
                breathe()
            num_waits += 1
            limit_s = _SERVE_S if self._devices is not None and self._devices.is_busy else None
            is_pending = self._devices is not None and self._devices.is_pending
            parts = self._running
            if (
                len(parts) == 1 and not is_pending
            ):  # as below, with less on the way of each value; a name would keep the part
                doorbell.wait_until(turn, limit_s, parts[0].cursor.idle(), parts[0].num_parties, parts[0].spin_us)
            elif parts and not is_pending:
                idle = idle_of([part.cursor for part in parts])
                doorbell.wait_until(turn, limit_s, idle, parts[0].num_parties, max(part.spin_us for part in parts))
            else:
                doorbell.wait_until(turn, limit_s, spin_us=max((part.spin_us for part in parts), default=0.0))

    def _mail_came(self) -> None:
        self._has_mail = True

    def _turn(self) -> bool:
        """Does what can be done now; whether that was anything."""
        parts = able = self._running
        if len(parts) > 1:  # those that cannot move are looked at now and then only: a look at each takes a microsecond
            self._num_turns += 1
            if self._num_turns % _ALL_TURNS:
                able = [part for part in parts if not part.cursor.is_idle()]
        has_moved = self._advance(able)
        if not has_moved and len(able) < len(parts):  # it may sleep now, and the end of a channel is rung for once only
            has_moved = self._advance([part for part in parts if part not in able])
        if self._devices is not None and self._devices.is_pending and self._devices.poll():
            has_moved = True
        if self._wires:
            for wires in self._wires.values():
                if wires.attend():
                    has_moved = True
        if has_moved and not self._doorbell.flags[1]:
            return True
        return self._look_around() or has_moved

    def _advance(self, parts: Sequence[Part]) -> bool:
        has_moved = False
        for part in parts:
            try:
                if part.cursor.advance():
                    has_moved = True
            except (ChannelError, DeviceError) as error:
                part.fault = fault_text(error, part.plan, part.cursor.action)
            except Exception as error:  # nobody has foreseen it: it ends this graph, and neither the actor nor others
                traceback.print_exc()
                told = ChannelError(f"{type(error).__name__}: {error}")
                part.fault = fault_text(told, part.plan, part.cursor.action)
        return has_moved

    def _look_around(self) -> bool:
        """Sees to what is not on a value's way: faults and messages."""
        has_rung = self._doorbell.take_mail_flag()
        if self._devices is not None and (has_rung or self._devices.is_busy):
            self._exchanges.enqueue_all()
            self._devices.serve()
        for part in [part for part in self._running if part.fault]:
            self._running.remove(part)
            self._tell_fault(part)
        if not (has_rung or self._has_mail):
            return self._is_stopped
        self._has_mail = False
        while not self._is_stopped:
            with with_reserve() as self._first_reserved:
                message = self._connection.take()
            if message is None:
                self._is_stopped = self._connection.is_closed
                break
            self._obey(pickle.loads(message.payload), message.fds)
        return True

    def _cannot_go_on(self, number: int, reason: str) -> None:
        """A device refused what a plan, running or still being opened, needs."""
        part = self._parts.get(number)
        if part is not None:
            part.fault = part.fault or reason

    def _tell_fault(self, part: Part) -> None:
        """No step of a part is taken any more: the driver hears why, and after it those who wait for its values."""
        send(self._connection, control.Faulted(part.number, part.fault, time.monotonic_ns()))
        if part.wiring.device_ends is not None:
            part.wiring.device_ends.on(Event.FAULT)

    def _obey(self, message: Any, fds: tuple[int, ...]) -> None:
        self._exchanges.forget_over()
        self._exchanges.enqueue_all()
        match message:
            case control.Create():
                self._create(message)
            case control.Call():
                self._call(message)
            case control.AskTopology():
                self._tell_topology(message)
            case control.Introduce():
                self._introduce(message.peer, *fds)
            case control.Listen():
                self._listen(message)
            case control.OpenPlan():
                self._open(message, fds)
            case control.ClosePlan():
                self._close(message)
            case control.Report():
                self._report(message)

    def _create(self, message: control.Create) -> None:
        self.name = message.actor
        self._gpus = message.gpus
        self._bells[message.actor] = self._doorbell.bell()
        self._doing = f"runs {message.actor}.__init__"
        try:
            if message.gpus:
                self._own_devices().select()
            if message.payload:
                cls, args, kwargs = pickle.loads(message.payload)
                self._instance = cls(*args, **kwargs)
        except Exception as error:
            failure = Failure.capture(error, actor=self.name, node=f"{self.name}.__init__")
            send(self._connection, control.Created(failure))
            self._is_stopped = True
            return
        finally:
            self._doing = ""
        send(self._connection, control.Created(None))

    def _call(self, message: control.Call) -> None:
        label = f"{self.name}.{message.method}"
        self._doing = f"runs {label}"
        try:
            args, kwargs = pickle.loads(message.payload)
            result = method_of(self._instance, message.method)(*args, **kwargs)
            given = result if message.num_returns == 1 else returns(result, message.num_returns)
            payload, failure = pickled_result(given, self.name, label)
        except SystemExit:
            raise
        except BaseException as error:
            payload, failure = b"", Failure.capture(error, actor=self.name, node=label)
        finally:
            self._doing = ""
        send(self._connection, control.Returned(message.number, payload, failure))

    def _tell_topology(self, message: control.AskTopology) -> None:
        payload, failure = b"", None
        try:
            from crossfade.device.capabilities import read_topology

            payload = dump_in_band(read_topology())
        except Exception as error:
            failure = Failure.capture(error, actor=self.name, node="asking for the GPUs")
        send(self._connection, control.Returned(message.number, payload, failure))

    def _introduce(self, peer: str, bell_memory_fd: int, bell_fd: int, pidfd: int) -> None:
        self._gone.discard(peer)  # an actor that was restarted
        self._bells[peer] = Bell(Memory(bell_memory_fd), bell_fd)
        self._pidfds[peer] = pidfd
        self._doorbell.watch(pidfd, lambda: self._peer_died(peer))

    def _own_devices(self) -> ActorDevices:
        """The devices of this process; what knows them is imported when first needed."""
        if self._devices is None:
            from crossfade.engines.actor_devices import ActorDevices

            self._devices = ActorDevices(self._gpus, self._break_off, self._doorbell, self._cannot_go_on)
            self.look_after(self._devices.failure)
        return self._devices

    def _break_off(self, peer: str) -> None:
        """A peer has died: no step takes anything from it any more. Any thread may call it."""
        reason = f"the process of {peer} is gone"
        for part in list(self._parts.values()):
            part.wiring.break_off(peer, reason)
        if self._devices is not None:
            self._devices.break_off(peer, reason)

    def _peer_died(self, peer: str) -> None:
        self._gone.add(peer)
        pidfd = self._pidfds.pop(peer)
        self._doorbell.unwatch(pidfd)
        os.close(pidfd)
        self._bells.pop(peer).close()
        self._break_off(peer)

    def _listen(self, message: control.Listen) -> None:
        port, failure = 0, None
        try:
            self._rendezvous[message.number] = Rendezvous(message.address, message.key)
            port = self._rendezvous[message.number].port
        except OSError as error:
            failure = Failure.capture(error, actor=self.name, node=f"listening at {message.address}")
        send(self._connection, control.Listening(message.number, port, failure))

    def _open(self, message: control.OpenPlan, fds: tuple[int, ...]) -> None:
        try:
            with explained(ChannelError, f"actor {self.name} has no room for them"):
                self._refuse_reserved(fds)
                self._parts[message.number] = part = self._opened_part(message, list(fds))
            self._running.append(part)
            if part.wiring.wires is not None:
                self._wires[message.number] = part.wiring.wires
            failure = None
        except NotUnpickled as error:
            cause = error.__cause__ or error
            failure = Failure.capture(cause, actor=self.name, node="unpickling what was bound to its methods")
        except Exception as error:
            failure = Failure.capture(error, actor=self.name, node="opening its channels")
        send(self._connection, control.Opened(message.number, failure))

    def _opened_part(self, message: control.OpenPlan, fds: list[int]) -> Part:
        mine = self._doorbell, self._bells, self._pidfds, self._gone, self._exchanges
        rendezvous = self._rendezvous.get(message.number)
        calls = self._own_devices, self._break_off, self._set_doing
        opener = PartOpener(self.name, self._instance, *mine, *calls, rendezvous)
        try:
            return opener.part(message, fds)
        except BaseException:
            if self._devices is not None:
                self._devices.abandon(message.number)
            raise

    def _set_doing(self, text: str) -> None:
        self._doing = text

    def _refuse_reserved(self, fds: Sequence[int]) -> None:
        if max(fds) >= self._first_reserved:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _close(self, message: control.ClosePlan) -> None:
        number = message.number
        self._wires.pop(number, None)
        rendezvous = self._rendezvous.pop(number, None)
        if rendezvous is not None:
            rendezvous.close()
        part = self._parts.pop(number, None)
        if part is not None:
            if part in self._running:
                self._running.remove(part)
            part.wiring.close()
            part.communicators.destroy()
            if part.guard is not None:
                part.guard.close()
        if self._devices is not None:
            self._devices.leave(number, lambda: self._say_closed(number), message.absent)
        else:
            self._say_closed(number)

    def _say_closed(self, number: int) -> None:
        send(self._connection, control.Closed(number))

    def _report(self, message: control.Report) -> None:
        part = self._parts.get(message.number)
        if part is None:  # another thread of the driver has closed the plan meanwhile
            send(self._connection, control.Reported(message.query, [], ActorStatistics()))
            return
        statistics = ActorStatistics(part.cursor.position[0], channel_statistics(part.wiring.ends))
        spans = part.recorder.spans() if part.recorder is not None else []
        if self._devices is not None:
            spans += self._devices.spans(message.number)
        send(self._connection, control.Reported(message.query, spans, statistics))

    def describe(self) -> ActorState:
        """What this actor is doing. Called by the sentinel while the main thread does it."""
        parts = list(self._parts.items())
        running = [self._running_node(part) for _, part in parts]
        doing = next((text for text in (self._doing, *running) if text), "waits")
        states = [
            PartState(number, part.cursor.position[0], str(part.cursor.action or ""), part.fault)
            for number, part in parts
        ]
        return ActorState(self.name, os.getpid(), doing, tuple(states), all_stacks())

    def _running_node(self, part: Part) -> str:
        """The method that a part's cursor is carrying out, if it is at one: a step that runs a method never waits."""
        action = part.cursor.action
        if part.fault or action is None or action.verb is not Verb.RUN:
            return ""
        return f"runs {self.name}.{part.plan.node[action.target].method} (node {action.target})"

    def leave_all(self) -> None:
        """Gives up all parts: the driver is gone, and this process goes on."""
        self._running.clear()
        self._wires.clear()
        while self._rendezvous:
            self._rendezvous.popitem()[1].close()
        while self._parts:
            _, part = self._parts.popitem()
            part.wiring.give_up()
            part.communicators.destroy()
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
        while self._bells:
            self._bells.popitem()[1].close()
        _joined.remove(self)

    def forked(self) -> None:
        """In a child that user code has forked: everything here is the parent's."""
        for part in self._parts.values():
            part.cursor.stop()
        self._is_stopped = self.is_forked = True
        self._connection.close()  # this process's descriptor only


_joined: list[Actor] = []
"""Those of this process that have not left it: one of the user's is joined again and again, and a fork's hook stays for ever."""


def _forked() -> None:
    for actor in _joined:
        actor.forked()


os.register_at_fork(after_in_child=_forked)
