"""Random graphs: drawn by hypothesis as data, built on the actors of any engine, run, and reduced to comparable results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import crossfade
from crossfade.api import session as sessions
from tests.helpers.workers import Worker, digest

NUM_ACTORS = 3
TENSOR_KINDS = ("int", "nested", "tensor", "tensor", "half", "turned", "tensors")
"""Kinds of values of a `tensor_workers.TensorWorker`."""
TENSOR_METHODS = ("work", "mix", "mix", "mix", "split", "fail_sometimes")
_SIZES = (0, 8, 200, 1500, 40_000)
_LARGE_SIZES = (1_000_000, 8_000_000)
_KINDS = ("int", "bytes", "array", "nested")
_METHODS = ("work", "work", "work", "split", "fail_sometimes")
_keys = itertools.count()


class Errors(frozenset[tuple[str, str]]):
    """In the place of a value: the errors, by type and text, one of which it has to be."""


@dataclass(frozen=True)
class NodeDraw:
    actor: int  # on which of the actors
    method: str  # what it does
    kind: str
    size_bytes: int
    sources: tuple[tuple[int, str], ...]
    """Which of the values that exist so far it takes: (index, how: positional, keyword, in a list, in a dict)."""


@dataclass(frozen=True)
class GraphDraw:
    """A graph, how it is compiled, and how it is executed."""

    nodes: tuple[NodeDraw, ...]  # in order
    parts: bool  # whether the input is taken by parts (``inp[0]``, ``inp.x``) or whole
    depth: int  # max_inflight
    overlap: bool  # as in compile
    transport: str  # asked of every node
    num_executions: int  # how often it runs
    dropped: frozenset[int]  # which executions' references are dropped at once
    newest_first: bool  # whether results are got in reverse


@st.composite
def graph_draws(
    draw: st.DrawFn,
    *,
    transports: Sequence[str] = ("auto",),
    with_large: bool = True,
    kinds: Sequence[str] = _KINDS,
    methods: Sequence[str] = _METHODS,
    most_depth: int = 8,
) -> GraphDraw:
    num_values = 2  # inp[0] and inp.x, or the input twice
    nodes = []
    sizes = _SIZES * 6 + _LARGE_SIZES if with_large else _SIZES
    for _ in range(draw(st.integers(1, 8))):
        method = draw(st.sampled_from(methods))
        how = st.sampled_from(("positional", "keyword", "list", "dict"))
        sources = draw(st.lists(st.tuples(st.integers(0, num_values - 1), how), max_size=3))
        nodes.append(
            NodeDraw(
                draw(st.integers(0, NUM_ACTORS - 1)),
                method,
                draw(st.sampled_from(kinds)),
                draw(st.sampled_from(sizes)),
                tuple(sources),
            )
        )
        num_values += 2 if method == "split" else 1
    num_executions = draw(st.integers(1, 5))
    return GraphDraw(
        nodes=tuple(nodes),
        parts=draw(st.booleans()),
        depth=draw(st.integers(1, most_depth)),
        overlap=draw(st.booleans()),
        transport=draw(st.sampled_from(transports)),
        num_executions=num_executions,
        dropped=frozenset(draw(st.lists(st.integers(0, num_executions - 1), max_size=2))),
        newest_first=draw(st.booleans()),
    )


@contextmanager
def session_of(session: sessions.Session) -> Iterator[None]:
    """Makes another session the program's for a while."""
    before, sessions._Holder.session = sessions._Holder.session, session
    try:
        yield
    finally:
        sessions._Holder.session = before


@contextmanager
def kept_session(**options: Any) -> Iterator[sessions.Session]:
    """A session that is the program's only where `session_of` makes it so: between, tests may have others of their own."""
    session = crossfade.init(**options)
    sessions._Holder.session = None
    try:
        yield session
    finally:
        with session_of(session):
            crossfade.shutdown()


class Bench:
    """A session with actors, on one engine. ``booked`` is what each actor books, such as ``num_gpus=1``, and ``totals`` what the
    session has of it; ``transport`` is asked of every node in place of what was drawn; processes ``preload`` modules.
    """

    def __init__(
        self,
        engine: str,
        cls: type = Worker,
        args: Sequence[Any] = (),
        booked: Mapping[str, float] | None = None,
        transport: str | None = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        self._transport = transport
        totals = {name: amount * NUM_ACTORS for name, amount in (booked or {}).items()}
        self.session = sessions.Session(sessions._make_engine(engine, 60.0, preload=preload), totals)
        with session_of(self.session):
            self.actors = [crossfade.remote(**(booked or {}))(cls).remote(*args) for _ in range(NUM_ACTORS)]

    def run(self, draws: Sequence[GraphDraw], key: str) -> list[list[Any]]:
        """Runs several graphs at once on the same actors: for each graph, the outcome of each execution."""
        with session_of(self.session):
            graphs = [self._compile(draw, f"{key}/{index}") for index, draw in enumerate(draws)]
            try:
                return _execute_all(graphs, draws)
            finally:
                for graph in graphs:
                    graph.teardown()

    def _compile(self, draw: GraphDraw, key: str) -> crossfade.CompiledGraph:
        with crossfade.InputNode() as inp:
            values: list[Any] = [inp[0], inp.x] if draw.parts else [inp, inp]
        for node, sources in zip(draw.nodes, sources_of(draw), strict=True):
            args, kwargs = arguments(key, node, [(values[at], how) for at, how in sources])
            bound = getattr(self.actors[node.actor], node.method).bind(*args, **kwargs)
            outputs = list(bound) if isinstance(bound, tuple) else [bound]
            values += [output.with_tensor_transport(self._transport or draw.transport) for output in outputs]
        leaves = [values[at] for at in leaves_of(draw)]
        graph: crossfade.CompiledGraph = crossfade.MultiOutputNode(leaves).compile(
            max_inflight=draw.depth, overlap=draw.overlap
        )
        return graph


Benches = tuple[Bench, Bench]
"""An inline and a local bench."""


@contextmanager
def open_benches(cls: type = Worker, preload: tuple[str, ...] = ()) -> Iterator[Benches]:
    """Both benches, closed at the end."""
    inline, local = Bench("inline", cls), Bench("local", cls, preload=preload)
    yield inline, local
    inline.session.close()
    local.session.close()


def check_against_plain_calls(benches: Benches, draws: Sequence[GraphDraw]) -> None:
    """Both engines must give what calling the methods one by one gives."""
    key = new_key()
    expected = run_directly(draws, key)
    for bench in benches:
        check_outcomes(bench.run(draws, key), expected, bench.session.engine.name)


def check_outcomes(found: list[list[Any]], expected: list[list[Any]], name: str) -> None:
    """Compares the outcomes of executions with what they must be, or with one of several errors that they may be."""
    assert len(found) == len(expected), name
    for number, (outcomes, wanted) in enumerate(zip(found, expected, strict=True)):
        assert len(outcomes) == len(wanted), (name, number)
        for execution, (mine, theirs) in enumerate(zip(outcomes, wanted, strict=True)):
            where = f"{name}, graph {number}, execution {execution}: {mine}, and not {theirs}"
            assert (mine is None) == (theirs is None), where
            assert all(map(_fits, mine or (), theirs or ())), where
            assert len(mine or ()) == len(theirs or ()), where


def _fits(outcome: Any, wanted: Any) -> bool:
    return outcome in wanted if isinstance(wanted, Errors) else bool(outcome == wanted)


def check_engines_agree(benches: Benches, draws: Sequence[GraphDraw]) -> None:
    """Both engines must give the same, bit for bit; for actors whose values plain calls cannot tell. Where several inputs of a
    method are errors, which of them it gives is not the same each time; the first in the order of the arguments, if all are there.
    """
    key = new_key()
    inline, local = ([_without_errors(graph) for graph in bench.run(draws, key)] for bench in benches)
    assert inline == local, draws


def _without_errors(outcomes: list[Any]) -> list[Any]:
    return [each and [value[0] if isinstance(value, tuple) else value for value in each] for each in outcomes]


def sources_of(draw: GraphDraw) -> list[list[tuple[int, str]]]:
    """For each node, which values it takes and how. Both parts of the input must be used by somebody."""
    sources = [list(node.sources) for node in draw.nodes]
    for index in range(2):
        sources[min(index, len(sources) - 1)].append((index, "positional"))
    return sources


def leaves_of(draw: GraphDraw) -> list[int]:
    """The values that no node takes."""
    used = {at for sources in sources_of(draw) for at, _ in sources}
    num_values = 2 + sum(2 if node.method == "split" else 1 for node in draw.nodes)
    return [at for at in range(2, num_values) if at not in used]


def arguments(key: str, node: NodeDraw, sources: Sequence[tuple[Any, str]]) -> tuple[list[Any], dict[str, Any]]:
    """What a node's method is called with."""
    named: dict[str, Any] = {}
    for index, (value, how) in enumerate(sources):
        if how == "keyword":
            named[f"k{index}"] = value
        elif how != "positional":
            named[f"n{index}"] = [1, (value,)] if how == "list" else {"deep": [value], "constant": 2}
    return [key, node.kind, node.size_bytes, *(value for value, how in sources if how == "positional")], named


def run_directly(draws: Sequence[GraphDraw], key: str) -> list[list[Any]]:
    """What the graphs must give: methods called one by one on plain objects, with nothing of crossfade in between."""
    return [_run_one_directly(draw, f"{key}/{index}") for index, draw in enumerate(draws)]


def _run_one_directly(draw: GraphDraw, key: str) -> list[Any]:
    workers = [Worker() for _ in range(NUM_ACTORS)]
    outcomes: list[Any] = []
    for number in range(draw.num_executions):
        values: list[Any] = [number, [number, "x"]] if draw.parts else [{"number": number}] * 2
        for node, sources in zip(draw.nodes, sources_of(draw), strict=True):
            values += _call_directly(workers[node.actor], key, node, [(values[at], how) for at, how in sources])
        outcome = [_direct_outcome(values[at]) for at in leaves_of(draw)]
        outcomes.append(None if number in draw.dropped else outcome)
    return outcomes


def _call_directly(worker: Worker, key: str, node: NodeDraw, sources: Sequence[tuple[Any, str]]) -> list[Any]:
    num_values = 2 if node.method == "split" else 1
    errors = [value for value, _ in sources]
    errors = [value for value in errors if isinstance(value, Errors)]
    if errors:  # whichever comes first
        return [Errors(error for each in errors for error in each)] * num_values
    args, kwargs = arguments(key, node, sources)
    try:
        result = getattr(worker, node.method)(*args, **kwargs)
    except KeyError as error:
        return [Errors([(f"TaskError({type(error).__name__})", repr(error))])] * num_values
    return list(result) if num_values > 1 else [result]


def _direct_outcome(value: Any) -> Any:
    return value if isinstance(value, Errors) else digest(value)


def _execute_all(graphs: Sequence[crossfade.CompiledGraph], draws: Sequence[GraphDraw]) -> list[list[Any]]:
    """Executions of all graphs in turn; results are got when a graph is full, and at the end."""
    outcomes: list[dict[int, Any]] = [{} for _ in graphs]
    held: list[dict[int, Any]] = [{} for _ in graphs]
    for number in range(max(draw.num_executions for draw in draws)):
        for graph, draw, refs, done in zip(graphs, draws, held, outcomes, strict=True):
            if number >= draw.num_executions:
                continue
            if len(refs) == draw.depth:
                _collect(refs, done, newest_first=draw.newest_first)
            made = graph.execute(number, x=[number, "x"]) if draw.parts else graph.execute({"number": number})
            if number not in draw.dropped:
                refs[number] = made
            del made
    for refs, draw, done in zip(held, draws, outcomes, strict=True):
        _collect(refs, done, newest_first=draw.newest_first)
    return [
        [done.get(number) for number in range(draw.num_executions)] for done, draw in zip(outcomes, draws, strict=True)
    ]


def _collect(refs: dict[int, Any], done: dict[int, Any], *, newest_first: bool) -> None:
    for number in sorted(refs, reverse=newest_first):
        done[number] = [_outcome(ref) for ref in refs.pop(number)]


def _outcome(ref: crossfade.CompiledRef) -> Any:
    try:
        return digest(ref.get(timeout=60))
    except crossfade.TaskError as error:
        return type(error).__name__, repr(error.cause)


def new_key() -> str:
    """A key that no other run of this process has."""
    return f"run{next(_keys)}"
