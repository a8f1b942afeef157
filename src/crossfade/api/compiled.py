"""A compiled graph: execute it, get its results, look at its plan and its timelines."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from crossfade.api.arguments import Splitter
from crossfade.api.options import CompileOptions
from crossfade.api.refs import CompiledRef
from crossfade.api.session import Session, current
from crossfade.engines.protocol import GraphStatistics, HalfSubmitted, OpenPlan
from crossfade.errors import (
    CapacityExceeded,
    ChannelError,
    ChannelTimeout,
    GetTimeoutError,
    GraphError,
    SessionError,
    TeardownTimeout,
)
from crossfade.graph.check import CheckedGraph, check
from crossfade.graph.nodes import MultiOutputNode, Node
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Timeline
from crossfade.types import DRIVER, Transport

if TYPE_CHECKING:
    from crossfade.schedule.cost import CostModel, Workload

__all__ = ["CompiledGraph", "Execution", "compile_graph"]

_GRACE_S = 1.0


class Execution:
    """One execution under way or finished. References hold it, so its values live as long as they are wanted.

    Attributes:
        number: counted from 0.
        values: one for each output, once collected.
        claims: one entry for each reference that is alive; a list, because its pop is atomic.
    """

    __slots__ = ("claims", "number", "values")

    def __init__(self, number: int, num_outputs: int) -> None:
        self.number = number
        self.values: list[Any] | None = None
        self.claims = [None] * num_outputs


class CompiledGraph:
    """What ``dag.compile()`` returns. Use it as a context manager, or call `teardown`.

    Any thread may execute and get. Results come in the order of the executions; references may be got in any order.

    Attributes:
        plan: what every actor does, as a value; ``print(graph.plan)`` shows it.
    """

    def __init__(
        self, session: Session, checked: CheckedGraph, plan: Plan, opened: OpenPlan, options: CompileOptions
    ) -> None:
        self.plan = plan
        self._session = session
        self._checked = checked
        self._opened = opened
        self._options = options
        self._splitter = Splitter(plan.inputs)
        self._takes_whole = self._splitter.takes_whole
        self._num_outputs = len(plan.outputs)
        self._returns_list = plan.returns_list
        self._max_inflight = plan.max_inflight
        self._inflight: deque[Execution] = deque()  # submitted and not collected
        self._num_submitted = 0
        self._submitting = threading.Lock()
        self._collecting = (
            threading.RLock()
        )  # an interrupt between taking and holding it must not lock its own thread out
        self._collected = threading.Condition()  # for threads that wait while another one collects
        self._num_waiting = 0
        self._ended = ""
        self._is_torn = False  # an interrupt (Ctrl-C) came while an input was written
        self._is_collect_torn = False  # ... while a result was taken in
        self._measured: Timeline | None = None

    # Executing

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Starts one execution and returns at once.

        Args:
            *args: what the graph's ``InputNode`` stands for; its parts are taken out of them.
            **kwargs: as above.

        Returns:
            A reference to the result; for a graph that ends in a ``MultiOutputNode`` a list of references.

        Raises:
            CapacityExceeded: ``max_inflight`` results have not been got.
            ActorDiedError: an actor of the graph is gone.
            TypeError: the arguments do not fit the graph.
            ChannelTimeout: ``submit_timeout`` passed before there was room.
        """
        values = args if self._takes_whole and len(args) == 1 and not kwargs else self._splitter.split(args, kwargs)
        with self._submitting:
            if self._ended:
                raise SessionError(f"the graph cannot be executed: {self._ended}")
            if self._is_torn or self._is_collect_torn:
                raise _torn()
            if len(self._inflight) >= self._max_inflight:
                self._make_room()
            execution = Execution(self._num_submitted, self._num_outputs)
            self._inflight.append(execution)  # before its results can come
            try:
                if not self._opened.try_submit(values):
                    self._submit_slowly(values)
            except HalfSubmitted as half:
                self._num_submitted += 1
                execution.claims.clear()
                raise half.failure.to_error() from None
            except BaseException as error:
                self._inflight.pop()
                self._is_torn = not isinstance(error, Exception)  # some inputs may be written and others not
                raise
            self._num_submitted += 1
        if self._returns_list:
            return [CompiledRef(self, execution, index) for index in range(self._num_outputs)]
        return CompiledRef(self, execution, 0)

    def _make_room(self) -> None:
        """Takes the oldest results in, and waits for them, unless it is the caller who has to get some first."""
        deadline = self._submit_deadline()
        while len(self._inflight) >= self._max_inflight:
            inflight = list(self._inflight)
            if len(inflight) < self._max_inflight:
                return  # another thread has collected one just now
            if all(execution.claims for execution in inflight):
                self._opened.check()
                raise CapacityExceeded(
                    f"{len(inflight)} executions are in flight, and max_inflight is {self._max_inflight}",
                    hint="get the oldest result first, or compile with a larger max_inflight",
                )
            try:
                self._collect(inflight[0], None if deadline is None else max(0.0, deadline - time.monotonic()))
            except GetTimeoutError as error:
                raise self._submit_timed_out() from error

    def _submit_slowly(self, values: Any) -> None:
        """Waits for room in a ring. Results are taken in meanwhile: the actors may be waiting for that."""
        deadline = self._submit_deadline()
        is_submitted = False

        def ready() -> bool:
            nonlocal is_submitted
            if self._ended:
                raise SessionError(f"the graph cannot be executed: {self._ended}")
            if self._inflight and self._collecting.acquire(blocking=False):
                try:
                    self._collect_next()
                finally:
                    self._stop_collecting()
            is_submitted = self._opened.try_submit(values)
            return is_submitted

        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._opened.wait_until(ready, left_s) and not is_submitted:
            raise self._submit_timed_out()

    def _submit_deadline(self) -> float | None:
        timeout_s = self._options.submit_timeout
        return None if timeout_s is None else time.monotonic() + timeout_s

    def _submit_timed_out(self) -> ChannelTimeout:
        return ChannelTimeout(
            f"there was no room for another execution within {self._options.submit_timeout} s",
            hint="an actor is slower than that; get results first, or compile with a larger submit_timeout",
        )

    # Collecting

    def _collect(self, execution: Execution, timeout: float | None) -> None:
        """Takes results in until those of ``execution`` are there."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._collecting.acquire(blocking=False) and not self._await_turn(execution, deadline):
            if execution.values is None:
                raise self._timed_out(execution, timeout)
            return  # another thread has collected it
        try:
            while execution.values is None:
                if self._ended:
                    raise SessionError(f"execution {execution.number} has no result: {self._ended}")
                if not self._collect_next():
                    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                    if not self._opened.wait_to_collect(self._collect_next, left_s):
                        raise self._timed_out(execution, timeout)
        finally:
            self._stop_collecting()

    def _await_turn(self, execution: Execution, deadline: float | None) -> bool:
        """Waits while another thread collects: True once this one may, False if that is not needed or the time is up."""
        with self._collected:
            self._num_waiting += 1
            try:
                while execution.values is None:
                    if self._collecting.acquire(blocking=False):
                        return True
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return False
                    self._collected.wait(left_s)
                return False
            finally:
                self._num_waiting -= 1

    def _stop_collecting(self) -> None:
        self._collecting.release()
        self._notify()

    def _notify(self) -> None:
        if self._num_waiting:  # a thread that is not counted yet has still to try the lock, or to look at its values
            with self._collected:
                self._collected.notify_all()

    def _collect_next(self) -> bool:
        """Takes in the results of the oldest execution, if they are there."""
        if self._ended:
            raise SessionError(f"there is no result: {self._ended}")
        if self._is_collect_torn:
            raise _torn()
        try:
            values = self._opened.try_collect()
            if values is not None:
                self._inflight.popleft().values = values
        except ChannelError as error:
            if self._ended:  # another thread has shut the session down
                raise SessionError(f"the results are gone: {self._ended}") from error
            raise
        except Exception:
            raise
        except BaseException:  # an interrupt: a value may be taken and in nobody's hands
            self._is_collect_torn = True
            raise
        if values is None:
            return False
        self._notify()
        return True

    def _timed_out(self, execution: Execution, timeout: float | None) -> GetTimeoutError:
        return GetTimeoutError(
            f"execution {execution.number} has not finished within {timeout} s", hint="get the same reference again"
        )

    # Seeing

    def predicted_timeline(
        self, workload: Workload | None = None, costs: CostModel | None = None, *, num_executions: int = 1
    ) -> Timeline:
        """When everything would run, by the simulator.

        Args:
            workload: how long methods compute and how large values are; the default knows neither.
            costs: what moving values costs on this machine; see `crossfade.calibrate`.
            num_executions: how many executions, ``max_inflight`` at a time.
        """
        from crossfade.schedule.cost import CostModel, Workload
        from crossfade.schedule.simulate import simulate

        return simulate(self.plan, workload or Workload(), costs or CostModel(), num_executions)

    def timeline(self) -> Timeline:
        """What has run when, on all actors, since the graph was compiled. Waits for actors that are in the middle of a method.

        Raises:
            GraphError: the graph was compiled without ``record=True``.
        """
        if not self._options.record:
            raise GraphError(
                "the graph does not record what it runs", hint="compile it with record=True (0.3 us an action)"
            )
        if not self._ended:
            self._measured = Timeline.of("measured", self._opened.spans())
        if self._measured is None:
            raise SessionError(f"the timeline is gone: {self._ended}", hint="call timeline() before teardown()")
        return self._measured

    def statistics(self) -> GraphStatistics:
        """Counters of the graph, its parties and their channels. Waits for actors that are in the middle of a method."""
        if self._ended:
            raise SessionError(f"there are no statistics: {self._ended}")
        finished = self._num_submitted - len(self._inflight)
        return GraphStatistics(self._num_submitted, finished, len(self._inflight), self._opened.statistics())

    def visualize(
        self, filename: str | Path = "compiled_graph", format: str = "png", view: bool = False, **_: Any
    ) -> str:
        """Draws the graph.

        Args:
            filename: where to, without the suffix.
            format: ``ascii`` (returned and printed), ``svg`` or ``dot``, or with Graphviz installed ``png``, ``pdf``, ``jpeg``.
            view: open the file.

        Returns:
            The drawing as text.
        """
        from crossfade.graph.draw import visualize

        return visualize(self._checked, str(filename), format, view)

    # Ending

    def teardown(self, kill_actors: bool = False, *, timeout: float | None = None) -> None:
        """Takes the graph from its actors, which go on living. Results that were got, or collected, stay valid. Idempotent.

        Waits for actors that are in the middle of a method. Threads that wait for a result get a `SessionError` at once.

        Args:
            kill_actors: end the actors too; those in the middle of a method after ``timeout`` (one second by default).
            timeout: the longest wait in seconds; None for ever.

        Raises:
            TeardownTimeout: an actor was busy for longer than that; it says with what. Call it again to wait on.
        """
        self._ended = self._ended or "it was torn down"
        if current() is not self._session:
            return  # the actors went with their session, or are the parent's of this forked process
        self._opened.nudge()
        grace_s = _GRACE_S if kill_actors and timeout is None else timeout
        with self._submitting, self._collecting:
            try:
                if self._options.record and self._measured is None:
                    self._measured = Timeline.of("measured", self._opened.spans(grace_s))
                self._opened.close(grace_s)
            except TeardownTimeout:
                if not kill_actors:
                    raise
        self._notify()
        if kill_actors:
            for actor in self.plan.programs.keys() - {DRIVER}:
                self._session.engine.kill(actor)
            self._opened.close()

    def _abandon(self) -> None:
        """The session ends."""
        self._ended = self._ended or "the session was shut down"
        self._opened.nudge()

    def _disown(self) -> None:
        """This process was forked: the graph is its parent's, and other threads may have held the locks."""
        self._ended = "it belongs to the process that this one was forked from"
        self._submitting = threading.Lock()
        self._collecting = threading.RLock()
        self._collected = threading.Condition()
        self._num_waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.teardown()

    def __del__(self) -> None:
        # Called by the garbage collector in the middle of anything: it only takes note.
        if not self.__dict__.get("_ended", "never opened"):
            self._session.orphans.append(self._opened)

    def __repr__(self) -> str:
        state = self._ended or f"{len(self._inflight)} in flight"
        return f"CompiledGraph({len(self.plan.nodes)} nodes on {len(self.plan.programs) - 1} actors, {state})"


def compile_graph(output: Node | MultiOutputNode, **options: Any) -> CompiledGraph:
    """Compiles a graph: checks it, decides what every actor does, opens the channels.

    Args:
        output: the node, or ``MultiOutputNode``, whose values an execution gives.
        options: see `CompileOptions`; Ray's spellings are accepted too.

    Raises:
        GraphError: the graph is not sound; the message names the node and ends in a hint.
    """
    from crossfade.schedule.compile import compile_plan

    chosen = CompileOptions.of(options)
    session = current()
    if session is None:
        raise SessionError("there is no session, so the graph's actors are gone", hint="make them anew")
    checked = check(output, session=session.id, transports=_transports())
    plan, calls = compile_plan(
        checked, max_inflight=chosen.max_inflight, buffer_bytes=chosen.buffer_bytes, overlap=chosen.overlap
    )
    session.bury_orphans()
    opened = session.engine.open(plan, calls, record=chosen.record, debug=chosen.debug)
    graph = CompiledGraph(session, checked, plan, opened, chosen)
    session.graphs.add(graph)
    return graph


def _torn() -> SessionError:
    return SessionError(
        "the graph was interrupted in the middle of moving a value", hint="tear it down and compile it again"
    )


def _transports() -> Mapping[str, Transport]:
    """The transports that a node may ask for."""
    return {transport.value: transport for transport in Transport}
