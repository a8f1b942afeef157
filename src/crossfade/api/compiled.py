"""A compiled graph: execute it, get its results, look at its plan and its timelines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from crossfade.api.accepted import check_names, limit_of
from crossfade.api.arguments import Splitter
from crossfade.api.execution import Execution
from crossfade.api.executions import Executions
from crossfade.api.links import known_links
from crossfade.api.options import CompileOptions
from crossfade.api.refs import CompiledRef, Keeper, Ref
from crossfade.api.session import Session, current
from crossfade.api.signals import take_signals
from crossfade.engines.protocol import GraphStatistics, OpenPlan
from crossfade.errors import GraphError, SessionError, TeardownTimeout
from crossfade.graph.check import CheckedGraph, check
from crossfade.graph.nodes import MultiOutputNode, Node
from crossfade.hints import add_note, check_flag
from crossfade.interrupted import Held, raise_held, uninterrupted, whole
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Timeline
from crossfade.types import DRIVER, Transport

if TYPE_CHECKING:
    from crossfade.schedule.cost import CostModel
    from crossfade.schedule.workload import Workload

_GRACE_S = 1.0
_TORN_DOWN = "the graph was torn down"
TRANSPORTS = [transport.value for transport in Transport if transport not in (Transport.COMMUNICATOR, Transport.TCP)]
"""Names that a node may ask for."""
_DRAWING_OPTIONS = ("filename", "format", "view", "channel_details")


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
        self._executions = Executions(session, plan, opened, options.submit_timeout)
        self._keeper = Keeper(self._executions)
        self._submit = self._executions.submit
        self._measured: Timeline | None = None
        self._id = os.urandom(16).hex()

    def get_id(self) -> str:
        """Returns an id that no other compiled graph has."""
        return self._id

    # Executing

    @whole
    def execute(self, /, *args: Any, **kwargs: Any) -> Any:
        """Starts one execution and returns at once.

        Args:
            *args: what the graph's ``InputNode`` stands for; its parts are taken out of them.
            **kwargs: as above.

        Returns:
            A reference to the result; for a graph that ends in a ``MultiOutputNode`` a list of references.

        Raises:
            CapacityExceeded: ``max_inflight`` results have not been got.
            ActorDiedError: an actor of the graph is gone.
            ActorError: one that lives cannot go on with it, for the reason that is given; tear the graph down.
            TypeError: the arguments do not fit the graph.
            StaticShapeError: nor do the shapes of their tensors fit what was promised of the input; the execution did not start.
            ChannelTimeout: ``submit_timeout`` passed before there was room.
            GraphClosed: it was torn down, or its session shut down.
            SessionError: it was interrupted while it moved a value, or is called in the middle of a call of its own.
        """
        execution = Execution(self._num_outputs)
        try:
            is_plain = self._takes_whole and len(args) == 1 and not kwargs and not isinstance(args[0], Ref)
            self._submit(execution, args if is_plain else self._splitter.split(args, kwargs))
            if self._returns_list:
                num = self._num_outputs
                return [CompiledRef(self._executions, execution, index, self._keeper) for index in range(num)]
            return CompiledRef(self._executions, execution, 0, self._keeper)
        except BaseException:
            execution.drop()  # it may be under way: a handler can raise once it is
            raise
        finally:
            if Held.is_pending:
                raise_held()

    async def execute_async(self, /, *args: Any, **kwargs: Any) -> Any:
        """Starts one execution from an event loop, and waits (without blocking the loop) until there is room for it.

        Args:
            *args: as for `execute`.
            **kwargs: as for `execute`.

        Returns:
            What `execute` returns. A reference can be awaited for its value, more than once and by several tasks:
            ``ref = await graph.execute_async(x)``, then ``value = await ref``.

        Raises:
            ActorDiedError, TypeError, GraphClosed, SessionError: as `execute`.
        """
        from crossfade.api.asynchronous import submit

        args = tuple([await arg if isinstance(arg, Ref) else arg for arg in args])
        kwargs = {key: await arg if isinstance(arg, Ref) else arg for key, arg in kwargs.items()}
        values = self._splitter.split(args, kwargs)

        execution = Execution(self._num_outputs)
        try:
            await submit(self._executions, execution, values)
            if self._returns_list:
                num = self._num_outputs
                return [CompiledRef(self._executions, execution, index, self._keeper) for index in range(num)]
            return CompiledRef(self._executions, execution, 0, self._keeper)
        except BaseException:
            execution.drop()  # as in `execute`; or the task was cancelled
            raise

    # Seeing

    def predicted_timeline(
        self, workload: Workload | None = None, costs: CostModel | None = None, *, num_executions: int = 1
    ) -> Timeline:
        """When everything would run, by the simulator.

        Args:
            workload: how long methods compute and how large values are; the default knows neither.
            costs: what moving values costs on this machine; see `crossfade.calibrate`.
            num_executions: how many executions, ``max_inflight`` at a time.

        Raises:
            ValueError: the workload names a method or a value that the graph does not have.
        """
        from crossfade.schedule.cost import CostModel
        from crossfade.schedule.simulate import simulate
        from crossfade.schedule.workload import Workload

        workload = workload or Workload()
        workload.check_names(self.plan)
        return simulate(self.plan, workload, costs or CostModel(), num_executions)

    @uninterrupted
    def timeline(self) -> Timeline:
        """What has run when, on all actors, since the graph was compiled. Waits for actors that are in the middle of a method.

        Raises:
            GraphError: the graph was compiled without ``record=True``.
        """
        if not self._options.record:
            raise GraphError(
                "the graph does not record what it runs", hint="compile it with record=True (0.3 us an action)"
            )
        if not self._executions.ended:
            self._measured = Timeline.of("measured", self._opened.spans(), hosts=self.plan.hosts)
        if self._measured is None:
            raise SessionError(
                f"the timeline is gone: {self._executions.ended}",
                hint="call timeline() or teardown() before crossfade.shutdown()",
            )
        return self._measured

    @uninterrupted
    def statistics(self) -> GraphStatistics:
        """Counters of the graph, its parties and their channels. Waits for actors that are in the middle of a method.

        Raises:
            SessionError: the graph is over.
        """
        if self._executions.ended:
            raise SessionError(f"there are no statistics: {self._executions.ended}")
        of = self._executions
        return GraphStatistics(of.num_submitted, of.num_collected, len(of.inflight), self._opened.statistics())

    def visualize(
        self,
        filename: str | Path = "compiled_graph",
        format: str = "png",
        view: bool = False,
        channel_details: bool = False,
        **unknown: Any,
    ) -> str:
        """Draws the graph.

        Args:
            filename: where to, without the suffix.
            format: ``ascii`` (returned and printed), ``svg`` or ``dot``, or with Graphviz installed ``png``, ``pdf``, ``jpeg``.
            view: open the file.
            channel_details: accepted for Ray's sake; how values travel is in every drawing.
            **unknown: refused.

        Returns:
            The drawing as text.

        Raises:
            TypeError: an unknown option.
            ValueError: there is no such format.
        """
        from crossfade.graph.draw import visualize

        check_names(unknown, _DRAWING_OPTIONS, (), "option of visualize")
        return visualize(self._checked, str(filename), format, view)

    # Ending

    @uninterrupted
    def teardown(self, kill_actors: bool = False, *, timeout: float | None = None) -> None:
        """Takes the graph from its actors, which stay alive. Results that were got, or collected, stay valid. Idempotent, also
        after an interrupt.

        Waits for actors that are in the middle of a method. Threads that wait for a result get a `GraphClosed` at once.

        Args:
            kill_actors: also end all actors of the graph; those inside a method after ``timeout`` (one second by default).
            timeout: the longest wait in seconds; None for ever.

        Raises:
            TeardownTimeout: an actor was busy for longer; the message says with what. Call this method again to continue waiting.
            TypeError: ``kill_actors`` is no bool, for example a time limit that was passed without its name.
        """
        given: Any = kill_actors
        meant = f"teardown(timeout={given})" if isinstance(given, Real) else ""
        kill_actors = check_flag("kill_actors", given, meant)
        timeout = limit_of(timeout)
        if (
            current() is not self._session
        ):  # the actors went with their session, or are the parent's of this forked process
            self._executions.end(_TORN_DOWN)
            return
        grace_s = _GRACE_S if kill_actors and timeout is None else timeout
        try:
            self._executions.close(_TORN_DOWN, partial(self._close, grace_s))
        except (TeardownTimeout, SessionError):
            if not (kill_actors and self._executions.ended):
                raise
        if kill_actors:
            for actor in self.plan.programs.keys() - {DRIVER}:
                self._session.engine.kill(actor)
            self._opened.close()

    def _close(self, timeout_s: float | None) -> None:
        if self._options.record and self._measured is None:
            self._measured = Timeline.of("measured", self._opened.spans(timeout_s), hosts=self.plan.hosts)
        self._opened.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tears it down; after an exception, such as Ctrl-C, without waiting long for a method that is still running."""
        if error is None:
            self.teardown()
            return
        try:
            self.teardown(timeout=_GRACE_S)
        except TeardownTimeout as late:
            add_note(error, str(late))

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be copied, pickled or sent to an actor\nhint: execute it here; a method may compile its own graph"
        )

    def __repr__(self) -> str:
        state = self._executions.ended or f"{len(self._executions.inflight)} in flight"
        return f"CompiledGraph({len(self.plan.nodes)} nodes on {len(self.plan.programs) - 1} actors, {state})"


def compile_graph(
    output: Node | MultiOutputNode, *, kind: type[CompiledGraph] = CompiledGraph, **options: Any
) -> CompiledGraph:
    """Compiles a graph: checks it, decides what every actor does, opens the channels. For the options see `CompileOptions`."""
    from crossfade.schedule.compile import compile_plan

    chosen = CompileOptions.of(options)
    session = current()
    if session is None:
        raise SessionError("there is no session, so the graph's actors are gone", hint="make them anew")
    checked = check(output, session=session.id, transports=TRANSPORTS)
    places = session.engine.places(checked.actors)
    checked = replace(checked, devices={**checked.devices, **places.gpus})
    topology, uuids = known_links(session, checked.devices) if not places.hosts else (None, {})
    plan, calls = compile_plan(
        checked,
        max_inflight=chosen.max_inflight,
        buffer_bytes=chosen.buffer_bytes,
        overlap=chosen.overlap,
        topology=topology,
        uuids=uuids,
        hosts=places.hosts,
    )
    return _open(session, checked, plan, calls, chosen, kind)


@uninterrupted
def _open(
    session: Session,
    checked: CheckedGraph,
    plan: Plan,
    calls: Mapping[str, Call],
    chosen: CompileOptions,
    kind: type[CompiledGraph],
) -> CompiledGraph:
    take_signals()
    session.bury_orphans()
    if plan.communicators:
        from crossfade.api.communicators import packed

        calls = packed(plan, calls)
    opened = session.engine.open(plan, calls, record=chosen.record, debug=chosen.debug)
    graph = kind(session, checked, plan, opened, chosen)
    session.graphs.add(graph)
    session.keepers.add(graph._keeper)
    if session.is_over:  # another thread has ended it meanwhile, and may not have seen this graph
        graph._executions.abandon()
    return graph
