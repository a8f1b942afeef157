"""Opening an actor's part of a plan: its channels, its devices, its communicators and the list of calls that they are bound to."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfade.engines import control
from crossfade.engines.board import device_memories, peers_of, uses_devices
from crossfade.engines.communicators import Communicators
from crossfade.engines.exchanges import Exchanges
from crossfade.engines.machine import spin_us_for
from crossfade.engines.rendezvous import Rendezvous, open_bulletin, open_wires
from crossfade.engines.unpicklable import NotUnpickled
from crossfade.engines.wiring import Wiring
from crossfade.errors import ChannelBroken
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import Memory
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.runtime.bind import bind
from crossfade.runtime.cursor import Cursor
from crossfade.runtime.guard import Guard
from crossfade.runtime.record import Recorder

if TYPE_CHECKING:
    from crossfade.engines.actor_devices import ActorDevices


@dataclass(slots=True)
class Part:
    """This actor's part of an open plan."""

    number: int
    plan: Plan
    cursor: Cursor
    wiring: Wiring
    recorder: Recorder | None
    num_parties: int
    spin_us: float
    guard: Guard | None
    communicators: Communicators
    fault: str = ""


@dataclass(slots=True)
class PartOpener:
    """Opens an actor's parts of plans. All that it has is the actor's own."""

    name: str
    instance: Any
    doorbell: Doorbell
    bells: dict[str, Bell]
    pidfds: dict[str, int]
    gone: set[str]  # peers that have died
    exchanges: Exchanges
    own_devices: Callable[[], ActorDevices]
    break_off: Callable[[str], None]  # called with a peer that has died
    set_doing: Callable[[str], None]  # called with what the actor does, for its description
    rendezvous: Rendezvous | None = None  # where peers on other hosts connect

    def part(self, message: control.OpenPlan, fds: list[int]) -> Part:
        """The part of this actor. Nothing is left of it where that raises, except in `ActorDevices`."""
        board_memory = Memory(fds.pop(0))
        board = board_memory.map(board_memory.size_bytes, populate=True)
        board_memory.close()
        store = Memory(fds.pop(0)) if message.has_store else None
        shared = None
        if uses_devices(message.plan, self.name):
            shared = {
                name: Memory(fds.pop(0)) for name in device_memories(message.plan, message.plan.host_of(self.name))
            }
        heaps = {owner: Memory(fd) for owner, fd in zip(message.heaps, fds, strict=True)}
        try:
            return self._wired(message, board, heaps, store, shared)
        except BaseException:
            for memory in (*heaps.values(), *(shared or {}).values()):
                memory.close()
            raise

    def _wired(
        self,
        message: control.OpenPlan,
        board: mmap.mmap,
        heaps: dict[str, Memory],
        store: Memory | None,
        shared: dict[str, Memory] | None,
    ) -> Part:
        plan = message.plan
        device_ends = copies = None
        with ExitStack() as undo:  # until the wiring has it
            if store is not None:
                undo.callback(store.close)
            try:
                calls = message.calls.load()  # first of all, since it may raise
            except Exception as error:
                raise NotUnpickled from error
            if shared is not None:
                device_ends = self.own_devices().open(message.number, plan, self.name, shared, self.pidfds)
            if plan.devices.get(self.name):
                copies = self.own_devices().host_copies(self.bells[self.name], self.doorbell.spin_us)
            communicators = self._initialized(plan, calls)
            undo.pop_all()

        def make() -> Wiring:
            ends = device_ends, copies, self.break_off, self.exchanges, communicators.by_id
            where = message.addresses, self.rendezvous
            wires = open_wires(plan, self.name, self.bells[self.name], self.doorbell, *where)
            bulletin = open_bulletin(plan, self.name, *where)
            return Wiring(plan, self.name, board, heaps, self.bells, store, *ends, wires, bulletin)

        peers = peers_of(plan, self.name)
        with ExitStack() as undo:
            undo.callback(communicators.destroy)
            is_alone = store is None
            wiring = make() if is_alone else _meet(make, self.doorbell, lambda: min(peers & self.gone, default=""))
            undo.callback(wiring.give_up)
            part = self._bound(message, wiring, calls, communicators)
            undo.pop_all()
        return part

    def _initialized(self, plan: Plan, calls: Mapping[str, Call]) -> Communicators:
        self.set_doing(f"initializes a communicator on {self.name}" if plan.communicators else "")
        try:
            return Communicators(plan, self.name, calls)
        finally:
            self.set_doing("")

    def _bound(
        self, message: control.OpenPlan, wiring: Wiring, calls: Mapping[str, Call], communicators: Communicators
    ) -> Part:
        plan = message.plan
        recorder = Recorder(self.name, message.origin_ns) if message.record else None
        mine = [node for node in plan.nodes if node.actor == self.name]
        methods = {node.id: getattr(self.instance, node.method) for node in mine}
        guard = Guard(plan, self.name) if message.debug else None
        gpus = self.own_devices() if recorder is not None and plan.devices.get(self.name) else None
        recorded = gpus.record(message.number, recorder) if gpus is not None and recorder is not None else []
        if recorded:
            wiring.record([device for device, _ in recorded])
        before_run = [self.exchanges.enqueue_all] if plan.devices.get(self.name) else []
        # A KeyboardInterrupt is the method's own: the driver's Ctrl-C does not come here.
        fatal = (SystemExit,)
        cursor = bind(plan, self.name, methods, calls, wiring.ends, recorder, guard, recorded, before_run, fatal)
        num_parties, spin_us = len(plan.programs), spin_us_for(plan)
        return Part(message.number, plan, cursor, wiring, recorder, num_parties, spin_us, guard, communicators)


def _meet(make: Callable[[], Wiring], doorbell: Doorbell, who_is_gone: Callable[[], str]) -> Wiring:
    """Makes a wiring in a thread: joining a gloo group waits for all of its parties, and cannot be interrupted.

    Raises a `ChannelBroken` once ``who_is_gone`` names a party that has died; what is made afterwards is closed.
    """
    lock = threading.Lock()
    made: list[Wiring] = []
    errors: list[BaseException] = []
    is_given_up = False

    def work() -> None:
        try:
            wiring = make()
        except BaseException as error:
            errors.append(error)
        else:
            with lock:
                made.append(wiring)
            if is_given_up:
                wiring.close()
        doorbell.nudge()

    threading.Thread(target=work, name="crossfade-meet", daemon=True).start()
    doorbell.wait_until(lambda: made or errors or who_is_gone())
    if errors:
        raise errors[0]
    with lock:
        is_given_up = not made
    if is_given_up:
        raise ChannelBroken(f"the process of {who_is_gone()} is gone, and the others cannot meet without it")
    return made[0]
