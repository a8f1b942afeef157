"""``crossfade.compile``: compiles a graph, whoever's ``bind`` has made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfade.api.compiled import CompiledGraph, compile_graph
from crossfade.api.session import Session, require
from crossfade.errors import ActorDiedError, GraphError, SessionError
from crossfade.graph.actors import ActorInfo
from crossfade.graph.collectives import bind_collective
from crossfade.graph.nodes import InputNode, MethodNode, MultiOutputNode, Node, bind, describe
from crossfade.types import DRIVER, CollectiveKind, ReduceOp

if TYPE_CHECKING:
    from crossfade.engines.ray import RayEngine
    from crossfade.engines.ray_graphs import Hint, Step


def compile(dag: Any, *unnamed: Any, **options: Any) -> CompiledGraph:  # noqa: A001
    """Compiles a graph.

    Args:
        dag: its output: a node, or a ``MultiOutputNode``. Or one of Ray's, made with Ray's own ``bind`` on handles of Ray actors,
            which need no change: the graph runs in them, and ``ray.get`` takes its references.
        *unnamed: refused.
        **options: see `CompileOptions`; Ray's names are accepted.

    Raises:
        GraphError: the graph is not sound, or something in a graph of Ray's cannot be taken over; the message says what.
        SessionError: a graph of Ray's, and the session runs on another engine.
        TypeError: an option without its name, or an unknown one.
        ValueError: an option is out of its range.
    """
    if not type(dag).__module__.startswith("ray."):
        if not isinstance(dag, Node):
            raise GraphError(
                f"a graph is compiled from a node, not from {type(dag).__name__}", hint="pass what bind returned"
            )
        compiled: CompiledGraph = dag.compile(*unnamed, **options)
        return compiled
    if unnamed:
        raise TypeError(
            f"compile is given {unnamed[0]!r}\nhint: options go by name, such as compile(dag, max_inflight=10)"
        )
    session = require()
    if session.engine.name != "ray":
        raise SessionError(
            f"a graph of Ray's needs the engine 'ray', and the session runs on {session.engine.name!r}",
            hint="call ray.init() before anything of crossfade's, or crossfade.init(engine='ray')",
        )
    output = _Taker(session).output(dag)
    return compile_graph(output, kind=TakenGraph, **options)


class TakenGraph(CompiledGraph):
    """A compiled graph that was built with Ray's ``bind``: its references are for ``ray.get``, and for ours."""

    def execute(self, /, *args: Any, **kwargs: Any) -> Any:
        """As in Ray, that an actor has died is said by ``ray.get``."""
        from crossfade.engines.ray_graphs import RaysRef

        self._hear_of_deaths()
        try:
            return _for_ray(super().execute(*args, **kwargs))
        except ActorDiedError as error:
            lost = [RaysRef(None, error) for _ in self.plan.outputs]
            return lost if self.plan.returns_list else lost[0]

    async def execute_async(self, /, *args: Any, **kwargs: Any) -> Any:
        self._hear_of_deaths()
        return _for_ray(await super().execute_async(*args, **kwargs))

    def _hear_of_deaths(self) -> None:
        """Before the first execution: an actor that was killed after the graph was compiled is dead for it, as in Ray, although its
        process may live long enough to take part.
        """
        if not self._executions.num_submitted and not self._executions.ended:
            engine: RayEngine = self._session.engine  # type: ignore[assignment]  # no other takes such graphs
            engine.hear_of_deaths(actor for actor in self.plan.programs if actor != DRIVER)


def _for_ray(references: Any) -> Any:
    from crossfade.engines.ray_graphs import RaysRef

    return [RaysRef(each) for each in references] if isinstance(references, list) else RaysRef(references)


class _Taker:
    """Makes our nodes of Ray's."""

    def __init__(self, session: Session) -> None:
        from crossfade.engines.ray import RayEngine

        assert isinstance(session.engine, RayEngine)
        self._session = session
        self._engine: RayEngine = session.engine
        self._made: dict[Any, Any] = {}
        self._infos: dict[str, ActorInfo] = {}
        self._input: InputNode | None = None
        self._num_gpus: dict[str, int] = {}

    def output(self, dag: Any) -> Node | MultiOutputNode:
        from crossfade.engines.ray_graphs import outputs_of, steps_of

        outputs, is_list = outputs_of(dag)
        steps = steps_of(outputs)
        self._adopt(steps)
        for step in steps:
            self._made[step.node] = self._node(step)
            if step.hint is not None and isinstance(self._made[step.node], Node):
                self._hint(self._made[step.node], step.hint)
        nodes = [self._made[each] for each in outputs]
        if is_list or len(nodes) > 1 or not isinstance(nodes[0], Node):
            return MultiOutputNode(nodes if is_list else list(nodes[0]))
        node: Node = nodes[0]
        return node

    def _hint(self, node: Node, hint: Hint) -> None:
        """What moves tensors between GPUs goes through the host's memory where there are none, as it would be without the hint."""
        transport = hint.transport
        if transport == "accelerator":
            maker = getattr(node, "parent", node)
            if isinstance(maker, MethodNode) and self._num_gpus[maker.actor.id]:
                raise GraphError(
                    f"{describe(node)} asks for the transport 'accelerator', and edges between GPUs of Ray's own actors cannot "
                    "be taken over yet",
                    hint="make the actors by @crossfade.remote, or leave the transport out: tensors then arrive on the CPU",
                )
            transport = "auto"
        node.with_tensor_transport(
            transport, hint.device, static_shape=hint.static_shape, direct_return=hint.direct_return
        )

    def _adopt(self, steps: list[Step]) -> None:
        """Every actor joins this session; all at once, since each takes its time."""
        from crossfade.engines.ray_graphs import Call, class_name

        handles = {step.what.handle._actor_id.hex(): step.what.handle for step in steps if isinstance(step.what, Call)}
        names = {}
        for key, handle in handles.items():
            name = names[key] = self._engine.name_of(key) or self._session.enter_actor(class_name(handle), None, {})[0]
            self._engine.adopt(key, name, handle)
        for key, handle in handles.items():
            where = self._engine.where(names[key])
            self._num_gpus[names[key]] = len(where.gpus)
            methods = dict.fromkeys(handle._ray_method_signatures, 1)
            info = ActorInfo(names[key], class_name(handle), self._session.id, methods, where.coroutines)
            self._infos[key] = self._session.actors.setdefault(info.id, info)

    def _node(self, step: Step) -> Any:
        from crossfade.engines.ray_graphs import Call, Collective, Input, Output

        match step.what:
            case Input(None):
                return self._whole()
            case Input(key, by_name) if key is not None:
                return getattr(self._whole(), str(key)) if by_name else self._whole()[key]
            case Output(of, index):
                return self._made[of][index]
            case Call():
                return self._call(step.what)
            case Collective():
                return self._collective(step.what)

    def _whole(self) -> InputNode:
        self._input = self._input or InputNode()
        return self._input

    def _call(self, call: Any) -> Any:
        from crossfade.engines.ray_graphs import replaced

        info = self._infos[call.handle._actor_id.hex()]
        if call.method in info.coroutines:
            raise GraphError(
                f"{info.id}.{call.method} is an async method, and methods of a graph run one after another",
                hint="make it a plain method; one that has to await something calls asyncio.run(...)",
            )
        args, kwargs = replaced(tuple(call.args), self._made.__getitem__), replaced(call.kwargs, self._made.__getitem__)
        made = bind(info, call.method, args, kwargs, call.num_returns)
        return made if isinstance(made, MethodNode) else tuple(made)

    def _collective(self, what: Any) -> Any:
        """What one actor gets; made for all of its places at once."""
        if what.places[0] not in self._made:
            members = [[self._made[node] for node in tensor] for tensor in what.members]
            op = ReduceOp(what.op) if CollectiveKind(what.kind).reduces else ReduceOp.SUM
            outputs = bind_collective(CollectiveKind(what.kind), members if len(members) > 1 else members[0], op=op)
            by_rank = list(zip(*outputs, strict=True)) if len(members) > 1 else outputs
            for place, made in zip(what.places, by_rank, strict=True):
                self._made[place] = made
        return self._made[what.places[what.rank]]
