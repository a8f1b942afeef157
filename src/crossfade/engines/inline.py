"""The inline engine: every actor lives in the driver's thread. Deterministic, and what every other engine is held against.

Values are copied along every edge between two actors, as they would be between processes. Where several threads execute and get,
one at a time does the work of all actors. What was submitted runs when a thread waits for a result.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from crossfade.channels.local import LocalReader, open_local
from crossfade.channels.values.codec import dump_in_band
from crossfade.engines.communicators import refuse_entangled
from crossfade.engines.control import Constants
from crossfade.engines.driver import DriverEnds, channel_statistics
from crossfade.engines.explained import torch_needed
from crossfade.engines.protocol import ActorSpec, ActorStatistics, Arrival, Places, method_of
from crossfade.engines.state import ActorState, Fate, PartState, RingState, State
from crossfade.engines.unpicklable import CulpritNamed, arguments, constants, pickled_result
from crossfade.errors import ActorError, ChannelError, Failure, PlanError
from crossfade.host.processes import KILLED, describe_exit
from crossfade.interrupted import interruptible, longest_sleep
from crossfade.plan.call import Call
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.plan.spans import Span
from crossfade.runtime.bind import Ends, bind
from crossfade.runtime.guard import Guard
from crossfade.runtime.record import Recorder
from crossfade.runtime.run import returns
from crossfade.topology import Topology
from crossfade.types import DRIVER


class _DoneCall:
    """A call that has run: they run when they are made. Or one in which its actor ended."""

    def __init__(self, value: Any, error: ActorError | None = None) -> None:
        self._value = value
        self._error = error

    def is_done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class InlineEngine:
    """Runs everything in the calling thread."""

    name = "inline"
    places_actors = False

    def __init__(self) -> None:
        self._instances: dict[str, Any] = {}
        self._fates: dict[str, Fate] = {}  # of all actors, by name
        self._plans: list[_InlinePlan] = []
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # a method may use a graph itself

    @interruptible
    def start_actor(self, actor: ActorSpec) -> None:
        cls = actor.cls
        with CulpritNamed(arguments(f"the constructor of {cls.__name__}", actor.args, actor.kwargs)):
            payload = dump_in_band((tuple(actor.args), dict(actor.kwargs)))
        fate = self._fates[actor.name] = Fate(actor.name, os.getpid())
        try:
            copied_args, copied_kwargs = pickle.loads(payload)
            with self._lock:
                self._instances[actor.name] = cls(*copied_args, **copied_kwargs)
            fate.is_created = True
        except (Exception, SystemExit) as error:
            fate.start_failure = Failure.capture(error, actor=actor.name, node=f"{cls.__name__}.__init__")

    def _instance(self, actor: str) -> Any:
        if actor not in self._instances:
            raise self._fates[actor].error()
        return self._instances[actor]

    @interruptible
    def call(
        self, actor: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_returns: int = 1
    ) -> _DoneCall:
        instance = self._instance(actor)
        with CulpritNamed(arguments(f"{actor}.{method}", args, kwargs)):
            payload = dump_in_band((tuple(args), dict(kwargs)))
        try:
            copied_args, copied_kwargs = pickle.loads(payload)
            with self._lock:
                result = method_of(instance, method)(*copied_args, **copied_kwargs)
                given = result if num_returns == 1 else returns(result, num_returns)
                pickled, failure = pickled_result(given, actor, f"{actor}.{method}")
                return _DoneCall(failure or pickle.loads(pickled))  # as from a process: it may be changed
        except KeyboardInterrupt:
            raise
        except SystemExit as error:
            self._end(actor, _how(error))
            return _DoneCall(None, self._fates[actor].error())
        except BaseException as error:
            return _DoneCall(Failure.capture(error, actor=actor, node=f"{actor}.{method}"))

    def ask_topology(self, actor: str) -> _DoneCall:
        """All actors are in this process, and nothing goes between GPUs."""
        return _DoneCall(Topology())

    def places(self, actors: Sequence[str]) -> Places:
        return Places()

    def open(self, plan: Plan, calls: Mapping[str, Call], *, record: bool, debug: bool = False) -> _InlinePlan:
        instances = {actor: self._instance(actor) for actor in plan.programs if actor != DRIVER}
        refuse_entangled(plan, [opened.plan for opened in self._plans])
        with CulpritNamed(constants(plan.nodes, calls)):
            copies = {node: Constants.of(call).load() for node, call in calls.items()}
        opened = _InlinePlan(
            next(self._numbers), plan, instances, copies, self._plans, self._lock, self._end, record=record, debug=debug
        )
        self._plans.append(opened)
        return opened

    def kill(self, actor: str) -> None:
        self._end(actor, KILLED)

    def _end(self, actor: str, how: str) -> None:
        if self._instances.pop(actor, None) is not None:
            self._fates[actor].end = how
            for plan in list(self._plans):
                plan.lose(self._fates[actor])

    def disown(self) -> None:
        """The child has copies of them."""

    def has_ended(self, actor: str) -> bool:
        return actor not in self._instances

    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        while not ready():
            has_moved = False
            for plan in list(self._plans):
                moved = plan.try_advance(ready)
                if moved is Moved.ENOUGH:
                    return True
                has_moved |= moved is Moved.SOME
            if not has_moved:
                return bool(ready())
        return True

    def loop_bell(self) -> None:
        pass

    def look(self, timeout_s: float) -> State:
        plans = list(self._plans)
        actors = [
            ActorState(actor, os.getpid(), "waits", tuple(s for plan in plans for s in plan.part_states(actor)))
            for actor in self._instances
        ]
        return State(tuple(actors), {plan.number: plan.rings() for plan in plans})

    def close(self) -> None:
        for plan in list(self._plans):
            plan.close()
        for actor in list(self._instances):
            self.kill(actor)


def _open_collectives(plan: Plan, ends: Mapping[str, Ends]) -> None:
    for spec in plan.collectives:
        with torch_needed("a collective"):
            from crossfade.collectives.local import open_local_collective
            from crossfade.collectives.terms import Terms
        terms = Terms(spec.id, spec.kind, spec.op, spec.root, spec.parties)
        parties = open_local_collective(terms, len(spec.outputs[spec.root]))
        for party, end in zip(spec.parties, parties, strict=True):
            ends[party].collectives[spec.id] = end


class Moved(Enum):
    """What the actors could do: nothing, something, or enough for the caller that waits."""

    NOTHING = auto()
    SOME = auto()
    ENOUGH = auto()


class _InlinePlan:
    """An open plan: all cursors, advanced in turn by the thread that waits."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        instances: Mapping[str, Any],
        calls: Mapping[str, Call],
        registry: list[_InlinePlan],
        lock: threading.RLock,
        end: Callable[[str, str], None],
        *,
        record: bool,
        debug: bool,
    ) -> None:
        self.number = number
        self.plan = plan
        self._registry = registry
        self._lock = lock
        self._end = end
        self._lost: Fate | None = None  # that of an actor that has ended
        self._nudged = threading.Condition()
        self._busy: set[str] = set()  # actors in the middle of a step, which may wait for another graph
        ends = {party: Ends() for party in plan.programs}
        self._rings: list[tuple[ChannelSpec, str, LocalReader]] = []
        for spec in plan.channels:
            writer, readers = open_local(spec.id, spec.depth, len(spec.readers))
            ends[spec.writer].writers[spec.id] = writer
            for name, reader in zip(spec.readers, readers, strict=True):
                ends[name].readers[spec.id] = reader
                self._rings.append((spec, name, reader))
        _open_collectives(plan, ends)
        origin_ns = time.monotonic_ns()
        self._recorders = {party: Recorder(party, origin_ns) if record else None for party in plan.programs}
        self._ends = ends
        driver = self._driver = DriverEnds(plan, ends[DRIVER], self._recorders[DRIVER])
        self.is_submitted, self.awaited = driver.is_submitted, driver.awaited
        self._guards = {actor: Guard(plan, actor) for actor in instances} if debug else {}
        methods = {node.id: getattr(instances[node.actor], node.method) for node in plan.nodes}
        self._cursors = {
            actor: bind(
                plan,
                actor,
                methods,
                calls,
                ends[actor],
                self._recorders[actor],
                self._guards.get(actor),
            )
            for actor in instances
        }

    def lose(self, fate: Fate) -> None:
        if fate.name in self._cursors:
            self._lost = self._lost or fate

    def try_advance(self, ready: Callable[[], object]) -> Moved:
        """Does what `_advance` does; nothing after an actor has ended."""
        return Moved.NOTHING if self._lost is not None else self._advance(ready)

    def _advance(self, ready: Callable[[], object]) -> Moved:
        """Lets one actor after another run, to a step that must wait or the end of its round, until ``ready()`` is true."""
        self.check()
        moved = Moved.NOTHING
        with self._lock:
            for actor in self._cursors:
                if self._advance_one(actor):
                    moved = Moved.SOME
                    if ready():
                        return Moved.ENOUGH
        return moved

    def _advance_one(self, actor: str) -> bool:
        if actor in self._busy or self._lost is not None:
            return False
        self._busy.add(actor)
        try:
            return self._cursors[actor].advance()
        except SystemExit as error:
            self._end(actor, _how(error))
            return True
        finally:
            self._busy.discard(actor)

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost.error()

    def explained(self, error: ChannelError) -> Exception:
        return error

    def try_submit(self, values: Sequence[Any]) -> bool:
        self.check()
        with self._lock:
            return self._driver.try_submit(values)

    def try_take(self) -> Any:
        with self._lock:
            return self._driver.try_take()

    def try_collect(self) -> Sequence[Arrival]:
        with self._lock:
            return self._driver.try_collect()

    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """Without an engine of its own that could make progress, standing still is a deadlock."""
        while not ready():
            match self._advance(ready):
                case Moved.ENOUGH:  # `ready` does work itself, so it is not called again
                    return True
                case Moved.NOTHING:
                    if ready():
                        return True
                    raise PlanError(f"the graph stands still and nothing more can happen:\n{self.plan}")
        return True

    def wait_to_collect(self, ready: Callable[[], object], place: int, timeout_s: float | None) -> bool:
        return self.wait_until(ready, timeout_s)

    def spans(self, timeout_s: float | None = None) -> list[Span]:
        return [span for recorder in self._recorders.values() if recorder is not None for span in recorder.spans()]

    def statistics(self) -> Mapping[str, ActorStatistics]:
        actors = {
            name: ActorStatistics(cursor.position[0], channel_statistics(self._ends[name]))
            for name, cursor in self._cursors.items()
        }
        return {DRIVER: self._driver.statistics(), **actors}

    def rings(self) -> tuple[RingState, ...]:
        return tuple(
            RingState(spec.id, spec.writer, name, spec.depth, reader.num_unread) for spec, name, reader in self._rings
        )

    def part_states(self, actor: str) -> list[PartState]:
        """Where an actor stands in this plan."""
        cursor = self._cursors.get(actor)
        return [] if cursor is None else [PartState(self.number, cursor.position[0], str(cursor.action or ""))]

    def wait_beside(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._nudged:
            while not ready():
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self._nudged.wait(longest_sleep(None if left_s is None else min(left_s, threading.TIMEOUT_MAX)))
        return True

    def nudge(self) -> None:
        with self._nudged:
            self._nudged.notify_all()

    def leave(self) -> None:
        self.close()

    def close(self, timeout_s: float | None = None) -> None:
        if self in self._registry:
            self._registry.remove(self)
            self._driver.close()
            for guard in self._guards.values():
                guard.close()


def _how(error: SystemExit) -> str:
    """What becomes of a process in which nobody catches it."""
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return describe_exit(code & 0xFF)
