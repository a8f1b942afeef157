"""A plan that runs on local processes, as the driver holds it."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter
from typing import Any

from crossfade.channels.values.fitting import Fitting
from crossfade.engines import control, errands
from crossfade.engines.board import heaps_of, meeting_parties, ring_states, set_aside_bytes
from crossfade.engines.driver import DriverEnds
from crossfade.engines.local_processes import SHUT_DOWN, Processes
from crossfade.engines.machine import spin_us_for
from crossfade.engines.protocol import ActorStatistics
from crossfade.engines.rendezvous import Rendezvous, listeners, open_wires
from crossfade.engines.site import Site
from crossfade.engines.state import RingState
from crossfade.engines.unpicklable import CulpritNamed, constants
from crossfade.engines.wiring import Wiring
from crossfade.errors import ActorError, ChannelError, Failure, GraphError, SessionError, TeardownTimeout
from crossfade.host.doorbell import Bell
from crossfade.host.frames import new_key
from crossfade.host.memory import available_bytes
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.plan.spans import Span
from crossfade.runtime.record import Recorder
from crossfade.types import DRIVER

_NUM_SHOWN = 3
_LOOK_S = 1.0


class LocalPlan:
    """A plan that `LocalEngine.open` has opened. ``record``: parties record their spans. ``debug``: actors watch their values."""

    def __init__(
        self,
        processes: Processes,
        number: int,
        plan: Plan,
        forget: Callable[[int], None],
        *,
        record: bool,
        debug: bool,
    ) -> None:
        self._debug = debug
        self._processes = processes
        self._forget = forget
        self.number = number
        self.plan = plan
        self._record = record
        self._origin_ns = time.monotonic_ns()
        self._actors = [name for name in plan.programs if name != DRIVER]
        self._answers: dict[tuple[type, str], Any] = {}
        self._reports: dict[int, dict[str, control.Reported]] = {}
        self._queries = itertools.count()
        self._lost: ActorError | None = None
        self._losses: list[
            tuple[int, ActorError]
        ] = []  # of actors that cannot go on, and when; 0 for deaths, which come first
        self._spin_us = spin_us_for(plan)
        self._is_closed = False
        self.is_leaving = False  # whether the actors were told to leave the plan
        self._told: dict[str, tuple[str, ...]] = {}  # by actor: the absent actors that it was told of
        self._wiring: Wiring | None = None
        self._board: mmap.mmap | None = None
        self._rendezvous: Rendezvous | None = None  # where parties on other hosts connect to the driver
        self._bell: Bell | None = None  # the driver's own, for what comes over wires
        self._driver: DriverEnds  # from `open` on

    def open(self, calls: Mapping[str, Call]) -> None:
        """Makes the channels and gives every party its part. Raises an error if an actor cannot do that, or memory is short."""
        plan = self.plan
        _refuse_too_large(plan)
        payloads = {  # before there is anything to give back: it may raise
            actor: _pickled(plan, actor, calls) for actor in self._actors
        }
        with ExitStack() as undo:  # whatever happens, but for what the driver's ends take over
            self._open(payloads, undo)
        self._await_opened()

    def _open(self, payloads: Mapping[str, control.Constants], undo: ExitStack) -> None:
        plan, processes, here = self.plan, self._processes, self.plan.host_of(DRIVER)
        addresses = self._listen()
        site = Site(plan, here, undo, keeper=DRIVER)
        at: dict[str, dict[str, control.OpenPlan]] = {here: {}}
        meeting = meeting_parties(plan)
        for actor in self._actors:
            host = plan.host_of(actor)
            at.setdefault(host, {})[actor] = control.OpenPlan(
                self.number,
                plan,
                payloads[actor],
                heaps_of(plan, actor),
                actor in meeting,
                self._record,
                self._origin_ns + processes.clock_offset_ns(host),
                self._debug,
                addresses,
            )
        for host, messages in at.items():
            if host == here:
                site.hand_out(processes, messages)
            else:
                processes.far_hosts[host].say(errands.OpenSite(plan, host, messages))
        self._board = site.board
        bells = {actor: processes.here(actor).bell for actor in at[here]}
        if self._rendezvous is not None or addresses is not None:
            bells[DRIVER] = self._bell = processes.doorbell.bell()
        wires = {}
        if DRIVER in bells:
            wires = dict(open_wires(plan, DRIVER, bells[DRIVER], processes.doorbell, addresses, self._rendezvous))
        wiring = self._wiring = Wiring(plan, DRIVER, site.board, site.kept, bells, wires=wires)
        site.keep()
        recorder = Recorder(DRIVER, self._origin_ns) if self._record else None
        driver = self._driver = DriverEnds(plan, wiring.ends, recorder, self._losses)
        self.try_submit, self.try_take, self.try_collect = driver.try_submit, driver.try_take, driver.try_collect
        self.is_submitted, self.awaited = driver.is_submitted, driver.awaited

    def _listen(self) -> control.Addresses | None:
        """Makes the parties listen to which others connect from other hosts; how they are reached, or None if there are none."""
        plan, processes = self.plan, self._processes
        parties = listeners(plan)
        if not parties:
            return None
        key = new_key()
        for party in parties:
            address = processes.addresses[plan.host_of(party)]
            if party == DRIVER:
                self._rendezvous = Rendezvous(address, key)
            else:
                processes.post(party, control.Listen(self.number, address, key))
        actors = [party for party in parties if party != DRIVER]
        self._await(lambda: all((control.Listening, a) in self._answers for a in actors))
        ports = {DRIVER: self._rendezvous.port} if self._rendezvous is not None else {}
        for actor in actors:
            answer: control.Listening = self._answers[control.Listening, actor]
            if answer.failure is not None:
                raise answer.failure.to_error()
            ports[actor] = answer.port
        of = {party: (processes.addresses[plan.host_of(party)], port) for party, port in ports.items()}
        return control.Addresses(key, of, {host: processes.addresses[host] for host in set(plan.hosts.values())})

    def _await(self, is_done: Callable[[], bool]) -> None:
        """Waits until that is so. Raises an error if an actor dies, or the session ends, before."""
        self._processes.wait_until(lambda: self._lost is not None or self._is_closed or is_done())
        if self._is_closed:
            raise SessionError(f"the graph was not compiled: {SHUT_DOWN}")
        if self._lost is not None:
            raise self._lost

    def _missing(self, kind: type) -> list[str]:
        is_alive = self._processes.is_alive
        return [actor for actor in self._actors if (kind, actor) not in self._answers and is_alive(actor)]

    def _await_opened(self) -> None:
        """Waits for every actor, or for the first one that dies, and raises what one could not do."""
        # An actor in a communicator's `initialize` may wait for ever for another one that has raised there.
        is_refused = self._has_refused if self.plan.communicators else bool
        self._await(lambda: not self._missing(control.Opened) or is_refused())
        for actor in self._actors:
            if (control.Opened, actor) in self._answers:
                failure: Failure | None = self._answers[control.Opened, actor].failure
                if failure is not None:
                    raise self._death() or failure.to_error()
            elif not self._has_refused():  # the actor died before the engine knew of this plan
                self._processes.process(actor)  # raises what became of it

    def _has_refused(self) -> bool:
        return any(kind is control.Opened and answer.failure for (kind, _), answer in list(self._answers.items()))

    def receive(self, actor: str, reply: control.OfPlan) -> None:
        if isinstance(reply, control.Reported):
            if reply.query in self._reports:
                self._reports[reply.query][actor] = reply
        elif isinstance(reply, control.Faulted):
            if reply.number == self.number and not self.is_leaving:
                self._losses.append((reply.at_ns, _cannot_go_on(actor, reply.text)))
        elif reply.number == self.number:
            self._answers[type(reply), actor] = reply
            if self.is_leaving and isinstance(reply, control.Opened) and reply.failure is not None:
                self._tell_to_leave()  # the others could not know
            self._end_if_left()

    def lose(self, actor: str, error: ActorError) -> None:
        if actor in self._actors:
            self._lost = self._lost or error.again(self._who_waited(actor))
            self._losses.append((0, self._lost))
            if self._wiring is not None:
                self._wiring.break_off(actor, str(error))
            self._end_if_left()

    def _end_if_left(self) -> None:
        """Closes the driver's side once the last actor has left, or where the session is over."""
        if self._is_closed or (self.is_leaving and not self._missing(control.Closed)):
            self.abandon()

    def check(self) -> None:
        if self._losses:
            raise self._why_lost().again()

    def _why_lost(self) -> ActorError:
        """What came first: a death, or the fault of an actor that lives, which others have heard of and told as well."""
        return self._death() or min(self._losses, key=itemgetter(0))[1]

    def _death(self) -> ActorError | None:
        """The death of an actor that others may have heard of, or met, before they told of anything: it is the reason for that."""
        if self._lost is None:
            self._processes.hear()
        if self._lost is None:
            self._processes.bury_ending(self._actors)
        return self._lost

    def explained(self, error: ChannelError) -> Exception:
        if self._death() is None and not self._losses:
            self._lose_cut_off(error)
        return self._why_lost().again() if self._lost is not None or self._losses else error

    def _lose_cut_off(self, error: ChannelError) -> None:
        """An actor whose connection with the driver is lost cannot go on, also while its host's agent counts as there: a link that
        was cut may end the agent's connection later than this one, and the reason is known only then.
        """
        wiring = self._wiring
        wires = None if wiring is None else wiring.wires
        for wire in () if wires is None else wires.all:
            if wire.fault and wire.fault in str(error) and not self._is_closed:
                self._losses.append((time.monotonic_ns(), _cannot_go_on(wire.peer, wire.fault)))

    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        return self._processes.doorbell.wait_until(ready, timeout_s)

    def wait_to_collect(self, ready: Callable[[], object], place: int, timeout_s: float | None) -> bool:
        idle, num_parties = self._driver.idle(place), len(self.plan.programs)
        return self._processes.doorbell.wait_until(ready, timeout_s, idle, num_parties, self._spin_us)

    def wait_beside(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        return self.wait_until(ready, timeout_s)

    def _query(self, timeout_s: float | None = None) -> dict[str, control.Reported]:
        processes, number = self._processes, next(self._queries)
        processes.refuse_to_wait(self._actors)
        answers: dict[str, control.Reported] = {}
        self._reports[number] = answers
        try:
            for actor in self._actors:
                if processes.is_alive(actor):
                    processes.post(actor, control.Report(self.number, number))
            processes.wait_until(
                lambda: all(a in answers or not processes.is_alive(a) for a in self._actors), timeout_s
            )
        finally:
            del self._reports[number]
        return answers

    def spans(self, timeout_s: float | None = None) -> list[Span]:
        answers = self._query(timeout_s)
        return [*self._driver.spans(), *(span for report in answers.values() for span in report.spans)]

    def statistics(self) -> Mapping[str, ActorStatistics]:
        answers = self._query()
        told = {DRIVER: self._driver.statistics(), **{actor: report.statistics for actor, report in answers.items()}}
        return {party: replace(each, host=self.plan.host_of(party)) for party, each in told.items()}

    def _who_waited(self, actor: str) -> str:
        """Which nodes, on other actors or the driver, need what an actor's nodes make."""
        plan = self.plan
        made = {value: node.id for node in plan.nodes if node.actor == actor for value in node.outputs}
        waiting = [
            f"{node.actor}.{node.method} (node {node.id}) waited for its node {made[value]}"
            for node in plan.nodes
            for value in node.inputs
            if node.actor != actor and value in made
        ]
        waiting += [f"the driver waited for its node {made[value]}" for value in plan.outputs if value in made]
        more = f", and {len(waiting) - _NUM_SHOWN} others" if len(waiting) > _NUM_SHOWN else ""
        return "".join(f"; {text}" for text in waiting[:_NUM_SHOWN]) + more

    def rings(self) -> tuple[RingState, ...]:
        """What lies in the shared-memory rings of this host."""
        return () if self._board is None else ring_states(self.plan, self._board, self.plan.host_of(DRIVER))

    def nudge(self) -> None:
        self._processes.doorbell.nudge()

    def leave(self) -> None:
        """After an interrupt it may be called again: it tells the actors that were not told yet."""
        self.is_leaving = True
        self._tell_to_leave()
        self._end_if_left()

    def _tell_to_leave(self) -> None:
        answers = {actor: self._answers.get((control.Opened, actor)) for actor in self._actors}
        absent = tuple(actor for actor, answer in answers.items() if answer is not None and answer.failure is not None)
        for actor in self._actors:
            if self._told.get(actor) != absent and self._processes.is_alive(actor):
                self._processes.post(actor, control.ClosePlan(self.number, absent))
                self._told[actor] = absent

    def close(self, timeout_s: float | None = None) -> None:
        self.leave()
        try:
            self._processes.refuse_to_wait(self._actors)
        except SessionError as error:
            raise TeardownTimeout(
                "the graph is about to be taken from its actors: a signal's handler has come in the middle of sending to one",
                hint="call teardown() again after the handler to wait for that, or teardown(kill_actors=True) to end the actors",
            ) from error
        if not self._processes.wait_until(lambda: self._is_closed, timeout_s):
            raise TeardownTimeout(
                f"the graph could not be taken from its actors within {timeout_s} s: {self._why_not_closed()}",
                hint="call teardown() again to wait on, or teardown(kill_actors=True) to end the actors",
            )

    def _why_not_closed(self) -> str:
        missing = self._missing(control.Closed)
        doing = {state.actor: state.doing for state in self._processes.look(_LOOK_S)}
        return ", ".join(f"{actor} {doing.get(actor, 'does not answer')}" for actor in missing)

    def abandon(self) -> None:
        """Closes the driver's side only. Where another thread is still opening it, that one calls this once more."""
        if not self._is_closed:
            self._is_closed = True
            self._forget(self.number)
            self._board = None
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()
        wiring, self._wiring = self._wiring, None
        if wiring is not None:
            wiring.close()
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()


def _pickled(plan: Plan, actor: str, calls: Mapping[str, Call]) -> control.Constants:
    """Pickles the arguments that one actor's nodes were bound with, and the communicators in whose groups it is."""
    nodes = [node for node in plan.nodes if node.actor == actor]
    mine = [node.id for node in nodes] + [each.id for each in plan.communicators if actor in each.parties]
    bound = [(calls[node.id].args, calls[node.id].kwargs) for node in nodes]
    with CulpritNamed(constants(nodes, calls)), Fitting(bound):
        return control.Constants.of({each: calls[each] for each in mine})


def _refuse_too_large(plan: Plan) -> None:
    """Before memory is taken: each party takes its own, and would find out late, or be killed by the system."""
    needed_bytes, free_bytes = set_aside_bytes(plan), available_bytes()
    if needed_bytes > free_bytes:
        raise GraphError(
            f"the rings of the graph take {needed_bytes} bytes of shared memory from the start, and {free_bytes} are available",
            hint="lower max_inflight or buffer_bytes",
        )


def _cannot_go_on(actor: str, text: str) -> ActorError:
    """An actor that lives has left a plan."""
    return ActorError(
        f"actor {actor} cannot go on with the graph: {text}",
        hint="tear the graph down; its actors can be used again",
        actor=actor,
    )
