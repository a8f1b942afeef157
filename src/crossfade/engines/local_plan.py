"""A plan that runs on local processes, as the driver holds it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crossfade.engines import control
from crossfade.engines.control import dump_user
from crossfade.engines.driver import DriverEnds
from crossfade.engines.protocol import ActorStatistics
from crossfade.engines.wiring import (
    Wiring,
    board_size_bytes,
    format_board,
    gloo_parties,
    heap_owners,
    heaps_of,
    peers_of,
)
from crossfade.errors import ActorDiedError, ActorError, ChannelError, Failure
from crossfade.host.memory import Memory
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Span
from crossfade.runtime.record import Recorder
from crossfade.types import DRIVER

if TYPE_CHECKING:
    from crossfade.engines.local import LocalEngine

__all__ = ["LocalPlan"]


class LocalPlan:
    """Made by `LocalEngine.open`.

    Args:
        engine: whose processes run it.
        number: its number among the engine's plans.
        plan: the plan.
        record: whether every party records its spans.
        debug: whether every actor watches its values.
    """

    def __init__(self, engine: LocalEngine, number: int, plan: Plan, *, record: bool, debug: bool) -> None:
        self._debug = debug
        self._engine = engine
        self._number = number
        self._plan = plan
        self._record = record
        self._origin_ns = time.monotonic_ns()
        self._actors = [name for name in plan.programs if name != DRIVER]
        self._answers: dict[tuple[type, str], Any] = {}
        self._reports: dict[int, dict[str, control.Reported]] = {}
        self._queries = itertools.count()
        self._lost: ActorError | None = None
        self._is_closed = False
        self._wiring: Wiring | None = None
        self._driver: DriverEnds  # from `open` on

    def open(self, calls: Mapping[str, Call]) -> None:
        """Makes the channels and gives every party its part.

        Raises:
            ActorError: an actor died meanwhile.
            CrossfadeError: an actor could not open its channels.
        """
        plan, engine = self._plan, self._engine
        payloads = {  # before there is anything to give back: it may raise
            actor: dump_user({node.id: calls[node.id] for node in plan.nodes if node.actor == actor})
            for actor in self._actors
        }
        board_memory = Memory.create("board", board_size_bytes(plan))
        board = board_memory.map(board_memory.size_bytes, populate=True)
        format_board(plan, board)
        heaps = {owner: Memory.create(f"heap-{owner}", 0) for owner in heap_owners(plan)}
        meeting = gloo_parties(plan)
        store = Memory.create("store", 0) if meeting else None
        for actor in self._actors:
            for peer in sorted(peers_of(plan, actor)):
                engine.introduce(actor, peer)
            needed = heaps_of(plan, actor)
            fds = (
                board_memory.fd,
                *((store.fd,) if store and actor in meeting else ()),
                *(heaps[owner].fd for owner in needed),
            )
            message = control.OpenPlan(
                self._number,
                plan,
                payloads[actor],
                needed,
                actor in meeting,
                self._record,
                self._origin_ns,
                self._debug,
            )
            engine.send(actor, message, fds)
        kept = {owner: heaps.pop(owner) for owner in heaps_of(plan, DRIVER)}
        for memory in (board_memory, *heaps.values(), *((store,) if store else ())):
            memory.close()
        bells = {actor: engine.bell(actor) for actor in self._actors}
        self._wiring = Wiring(plan, DRIVER, board, kept, bells)
        recorder = Recorder(DRIVER, self._origin_ns) if self._record else None
        self._driver = DriverEnds(plan, self._wiring.ends, recorder)
        self._await(control.Opened)

    def _await(self, kind: type) -> None:
        """Waits for an answer of every living actor, and raises what they could not do."""
        engine = self._engine

        def is_complete() -> bool:
            return all((kind, actor) in self._answers or not engine.is_alive(actor) for actor in self._actors)

        engine.await_answers(is_complete)
        if kind is control.Opened:
            if self._lost is not None:
                raise self._lost
            for actor in self._actors:
                if (kind, actor) not in self._answers:  # it died before the engine knew of this plan
                    raise ActorDiedError(f"actor {actor} is dead")
                failure: Failure | None = self._answers[kind, actor].failure
                if failure is not None:
                    raise failure.to_error()

    def receive(self, actor: str, reply: control.Opened | control.Closed | control.Reported) -> None:
        """An actor has answered."""
        if isinstance(reply, control.Reported):
            if reply.query in self._reports:
                self._reports[reply.query][actor] = reply
        elif reply.number == self._number:
            self._answers[type(reply), actor] = reply

    def lose(self, actor: str, error: ActorError) -> None:
        """An actor's process has ended."""
        if actor in self._actors:
            self._lost = self._lost or error
            if self._wiring is not None:
                self._wiring.break_off(actor, str(error))

    def try_submit(self, values: Sequence[Any]) -> bool:
        """See the protocol."""
        if self._lost is not None:
            raise self._fresh_error()
        try:
            return self._driver.try_submit(values)
        except ChannelError as error:
            raise self._explained(error) from None

    def try_collect(self) -> list[Any] | None:
        """See the protocol."""
        try:
            values = self._driver.try_collect()
        except ChannelError as error:
            raise self._explained(error) from None
        if values is None and self._lost is not None:
            raise self._fresh_error()
        return values

    def _fresh_error(self) -> ActorError:
        """The loss as a new object: one error raised twice would collect tracebacks."""
        lost = self._lost
        error = type(lost)(str(lost)) if lost is not None else ActorDiedError("an actor is gone")
        error.__cause__ = lost.__cause__ if lost is not None else None
        return error

    def _explained(self, error: ChannelError) -> Exception:
        self._engine.doorbell.pump()  # the death behind a broken channel may be known by now
        return self._fresh_error() if self._lost is not None else error

    def wait_until(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """See the protocol."""
        return self._engine.doorbell.wait_until(ready, timeout_s)

    def wait_to_collect(self, ready: Callable[[], object], timeout_s: float | None) -> bool:
        """See the protocol."""
        return self._engine.doorbell.wait_until(ready, timeout_s, self._driver.idle(), len(self._plan.programs))

    def _query(self) -> dict[str, control.Reported]:
        number = next(self._queries)
        answers: dict[str, control.Reported] = {}
        self._reports[number] = answers
        engine = self._engine
        for actor in self._actors:
            if engine.is_alive(actor):
                engine.send(actor, control.Report(self._number, number))
        engine.await_answers(lambda: all(a in answers or not engine.is_alive(a) for a in self._actors))
        return self._reports.pop(number)

    def spans(self) -> list[Span]:
        """See the protocol."""
        answers = self._query()
        return [*self._driver.spans(), *(span for report in answers.values() for span in report.spans)]

    def statistics(self) -> Mapping[str, ActorStatistics]:
        """See the protocol."""
        answers = self._query()
        return {DRIVER: self._driver.statistics(), **{actor: report.statistics for actor, report in answers.items()}}

    def close(self) -> None:
        """See the protocol. Waits for actors that are in the middle of a method."""
        if not self._is_closed:
            for actor in self._actors:
                if self._engine.is_alive(actor):
                    self._engine.send(actor, control.ClosePlan(self._number))
            self._await(control.Closed)
            self.abandon()

    def abandon(self) -> None:
        """Closes the driver's side only."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.forget(self._number)
            if self._wiring is not None:
                self._wiring.close()
