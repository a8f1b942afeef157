"""Collectives between processes, held against plain torch and against the same graph in one thread."""

from __future__ import annotations

import operator
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfade
from crossfade.api import session as sessions
from crossfade.collective import ReduceOp, allgather, allreduce, broadcast, reducescatter
from crossfade.types import Transport
from tests.helpers.calm import calm_s
from tests.helpers.graphs import session_of

torch = pytest.importorskip("torch", reason="collectives need torch")

NUM_ACTORS = 3
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")


def make(rank: int, seed: int, shape: Sequence[int], dtype: str) -> Any:
    """A tensor of small numbers that follows from rank and seed; products of three fit into int8."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    low = 0 if dtype == "uint8" else -4
    return torch.randint(low, 5, tuple(shape), generator=generator).to(getattr(torch, dtype))


class Maker:
    """An actor that makes tensors."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kept: Any = None

    def make(self, seed: int, shape: Sequence[int], dtype: str) -> Any:
        """See `make`."""
        return make(self.rank, seed, shape, dtype)

    def keep(self, seed: int) -> Any:
        """A tensor that this actor keeps too."""
        self.kept = make(self.rank, seed, (1000,), "float32")
        return self.kept

    def is_kept_as_it_was(self, seed: int, _: Any) -> bool:
        """Whether nobody has changed what is kept."""
        return bool(torch.equal(self.kept, make(self.rank, seed, (1000,), "float32")))

    def fail_for(self, seed: int, bad: int) -> Any:
        """Raises for one seed."""
        if seed == bad:
            raise KeyError(f"seed {seed} on {self.rank}")
        return make(self.rank, seed, (4,), "float32")

    def transposed(self, seed: int) -> Any:
        """A matrix whose rows are not in one piece, and which wants gradients."""
        return (torch.arange(6.0).reshape(2, 3) + seed).t().requires_grad_()

    def of_length(self, seed: int) -> Any:
        """A tensor whose length differs between the ranks for odd seeds."""
        return torch.ones(4 + self.rank * (seed % 2))

    def whatever(self, value: Any) -> Any:
        """The value itself."""
        return value

    def spoil(self, value: Any) -> None:
        """Changes what it is given, which nobody may."""
        value.zero_()

    def add(self, first: Any, second: Any) -> Any:
        """The sum of two tensors, of whatever shape."""
        return first.reshape(-1)[:4] + second.reshape(-1)[:4]

    def work(self, num_steps: int) -> int:
        """Takes a while."""
        return sum(1 for _ in range(num_steps))

    def sleep(self, time_s: float) -> Any:
        """Takes a while too."""
        time.sleep(time_s)
        return torch.ones(4)


@dataclass
class Bench:
    """A session with actors.

    Attributes:
        session: the session.
        actors: the actors.
        is_by_copy: whether collectives go the way of GPU tensors, with CPU tensors in their place.
    """

    session: sessions.Session
    actors: list[Any]
    is_by_copy: bool = False

    @classmethod
    @contextmanager
    def open(cls, engine: str) -> Iterator[Bench]:
        """One with actors of its own."""
        session = sessions.Session(sessions._make_engine(engine, 60.0))
        with session_of(session):
            actors = [crossfade.remote(Maker).remote(rank) for rank in range(NUM_ACTORS)]
        try:
            yield cls(session, actors)
        finally:
            session.close()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Graphs that are compiled here belong to it."""
        with pytest.MonkeyPatch.context() as patch, session_of(self.session):
            if self.is_by_copy:
                patch.setattr("crossfade.schedule.lower.transport_of_collective", lambda *_: Transport.COPY)
            yield

    def run(
        self, build: Callable[[list[Any], Any], list[Any]], inputs: Sequence[Any], **options: Any
    ) -> list[list[Any]]:
        """What a graph gives for each of several inputs, all under way at once: values, or errors."""
        with self.compiling():
            inp = crossfade.InputNode()
            with crossfade.MultiOutputNode(build(self.actors, inp)).compile(**options) as graph:
                return [[outcome(ref) for ref in refs] for refs in [graph.execute(each) for each in inputs]]


def outcome(ref: crossfade.CompiledRef) -> Any:
    try:
        return ref.get(timeout=60)
    except crossfade.TaskError as error:
        return error


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Bench, Bench]]:
    """One thread, and processes, whose collectives go by gloo or by copies."""
    with Bench.open("inline") as inline, Bench.open("local") as local:
        yield inline, local


@pytest.fixture(params=["local", "copy"])
def local(request: pytest.FixtureRequest, both: tuple[Bench, Bench]) -> Bench:
    """The processes; with ``copy`` their collectives are by copies."""
    return replace(both[1], is_by_copy=request.param == "copy")


@pytest.fixture(params=["inline", "local", "copy"])
def bench(request: pytest.FixtureRequest, both: tuple[Bench, Bench]) -> Bench:
    """One thread, or as `local`."""
    return both[0] if request.param == "inline" else replace(both[1], is_by_copy=request.param == "copy")


def expected_reduction(tensors: Sequence[Any], op: ReduceOp) -> Any:
    """By plain torch, in a dtype wide enough to be exact."""
    wide = [each.to(torch.float64 if each.is_floating_point() else torch.int64) for each in tensors]
    functions: dict[ReduceOp, Callable[[Any, Any], Any]] = {
        ReduceOp.PRODUCT: operator.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }
    result = reduce(functions.get(op, operator.add), wide)
    return (result / len(wide) if op is ReduceOp.AVG else result).to(tensors[0].dtype)


def all_makes(seed: int, shape: Sequence[int], dtype: str) -> list[Any]:
    return [make(rank, seed, shape, dtype) for rank in range(NUM_ACTORS)]


def same(found: Any, wanted: Any) -> bool:
    close = torch.allclose if wanted.is_floating_point() else torch.equal
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bool(close(found, wanted))


# Every kind, reduction and dtype


@pytest.mark.parametrize("op", list(ReduceOp))
def test_reductions_of_every_dtype(bench: Bench, op: ReduceOp) -> None:
    """All-reduce and reduce-scatter, MAX included, in one graph per reduction."""
    dtypes = FLOATS if op is ReduceOp.AVG else FLOATS + INTEGERS
    shapes = ((6, 5), (3,), (0,))
    cases = [(dtype, shape) for dtype in dtypes for shape in shapes]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        outputs: list[Any] = []
        for dtype, shape in cases:
            nodes = [actor.make.bind(inp, shape, dtype) for actor in actors]
            outputs += allreduce.bind(nodes, op=op) + reducescatter.bind(nodes, op=op.name)
        return outputs

    for seed, values in zip((1, 2), bench.run(build, (1, 2)), strict=True):
        for case, (dtype, shape) in enumerate(cases):
            wanted = expected_reduction(all_makes(seed, shape, dtype), op)
            reduced, parts = values[6 * case : 6 * case + 3], values[6 * case + 3 : 6 * case + 6]
            assert all(same(each, wanted) for each in reduced), (dtype, shape)
            assert all(same(a, b) for a, b in zip(parts, wanted.chunk(NUM_ACTORS), strict=False) if b.numel())
            assert all(each.shape == (shape[0] // NUM_ACTORS, *shape[1:]) for each in parts)


def test_gathers_and_broadcasts_of_every_dtype(bench: Bench) -> None:
    dtypes = (*FLOATS, *INTEGERS, "bool", "complex64")
    shapes = ((2, 3), (0, 4), (7,))
    cases = [(dtype, shape) for dtype in dtypes for shape in shapes]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        outputs: list[Any] = []
        for dtype, shape in cases:
            nodes = [actor.make.bind(inp, shape, dtype) for actor in actors]
            outputs += allgather.bind(nodes[::-1])
            outputs += broadcast.bind([actors[0], nodes[1], actors[2].whatever.bind("no tensor")], root=1)
        return outputs

    ((*values,),) = bench.run(build, (5,))
    for case, (dtype, shape) in enumerate(cases):
        tensors = all_makes(5, shape, dtype)
        gathered, got = values[6 * case : 6 * case + 3], values[6 * case + 3 : 6 * case + 6]
        assert all(same(each, torch.cat(tensors[::-1])) for each in gathered), (dtype, shape)
        assert all(same(each, tensors[1]) for each in got), (dtype, shape)


def test_a_broadcast_of_a_number_without_dimensions(bench: Bench) -> None:
    ((*values,),) = bench.run(
        lambda actors, inp: broadcast.bind([actors[0].make.bind(inp, (), "int64"), *actors[1:]]), (3,)
    )
    assert values == [make(0, 3, (), "int64")] * 3


def test_buckets_of_several_dtypes_and_shapes(bench: Bench) -> None:
    layouts = [((3, 2), "float32"), ((5,), "int64"), ((), "float32"), ((4,), "float16"), ((2,), "int16")]

    def build(actors: list[Any], inp: Any) -> list[Any]:
        nodes = [[actor.make.bind(inp, shape, dtype) for shape, dtype in layouts] for actor in actors]
        rows = allreduce.bind(nodes)
        assert [len(row) for row in rows] == [len(layouts)] * NUM_ACTORS
        return [output for row in rows for output in row]

    for values in bench.run(build, (4, 4)):
        for rank in range(NUM_ACTORS):
            for index, (shape, dtype) in enumerate(layouts):
                wanted = expected_reduction(all_makes(4, shape, dtype), ReduceOp.SUM)
                assert same(values[rank * len(layouts) + index], wanted)


def test_tensors_that_do_not_lie_in_one_piece(bench: Bench) -> None:
    nodes = bench.run(
        lambda actors, inp: [
            *allreduce.bind([actor.transposed.bind(inp) for actor in actors[:2]]),
            *allgather.bind([actor.transposed.bind(inp) for actor in actors[:2]]),
            *broadcast.bind([actor.transposed.bind(inp) for actor in actors[:2]]),
        ],
        (1,),
    )[0]
    one = Maker(0).transposed(1)
    assert torch.equal(nodes[0], one + one)
    assert torch.equal(nodes[2], torch.cat([one, one]))
    assert torch.equal(nodes[5], one)
    assert not any(each.requires_grad for each in nodes)


def test_inputs_are_never_changed(bench: Bench) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        kept = [actor.keep.bind(inp) for actor in actors]
        after = allreduce.bind(kept, op="avg")
        return [actor.is_kept_as_it_was.bind(inp, value) for actor, value in zip(actors, after, strict=True)]

    for seed in (1, 2):
        assert bench.run(build, (seed,)) == [[True] * 3]


# What goes wrong


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exception_upstream_reaches_all_and_the_graph_goes_on(bench: Bench, overlap: bool) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        nodes = [actor.fail_for.bind(inp, 2 if rank == 1 else -1) for rank, actor in enumerate(actors)]
        return [*allreduce.bind(nodes), *broadcast.bind(nodes)]

    first, failed, last = bench.run(build, (1, 2, 3), overlap=overlap)
    assert all(isinstance(error, KeyError) and "seed 2 on 1" in str(error) for error in failed)
    for seed, values in ((1, first), (3, last)):
        wanted = expected_reduction(all_makes(seed, (4,), "float32"), ReduceOp.SUM)
        assert all(same(value, wanted) for value in values[:3])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tensor_that_does_not_fit_reaches_all_and_the_graph_goes_on(bench: Bench, overlap: bool) -> None:
    def build(actors: list[Any], inp: Any) -> list[Any]:
        return allreduce.bind([actor.of_length.bind(inp) for actor in actors])

    for seed, values in zip((0, 1, 2), bench.run(build, (0, 1, 2), overlap=overlap), strict=True):
        if seed % 2:
            names = [actor._info.id for actor in bench.actors]
            brings = "; ".join(f"{name} brings float32 ({4 + rank},)" for rank, name in enumerate(names))
            assert all(isinstance(error, ValueError) and brings in str(error) for error in values)
        else:
            assert all(torch.equal(value, torch.full((4,), 3.0)) for value in values)


@pytest.mark.parametrize(
    ("bind", "shape", "dtype", "kind", "says"),
    [
        (lambda nodes: allreduce.bind(nodes, op="avg"), (3,), "int32", TypeError, "no average"),
        (lambda nodes: allreduce.bind(nodes), (3,), "bool", TypeError, "not reduced"),
        (lambda nodes: reducescatter.bind(nodes), (4, 2), "float32", ValueError, "3 equal parts"),
        (lambda nodes: reducescatter.bind(nodes), (), "float32", ValueError, "unsqueeze"),
        (lambda nodes: allgather.bind(nodes), (), "float32", ValueError, "without dimensions"),
    ],
)
def test_what_cannot_be_done_says_so(
    bench: Bench, bind: Any, shape: Sequence[int], dtype: str, kind: type[Exception], says: str
) -> None:
    ((*errors,),) = bench.run(lambda actors, inp: bind([actor.make.bind(inp, shape, dtype) for actor in actors]), (1,))
    assert all(isinstance(error, kind) and says in str(error) and "hint: " in str(error) for error in errors)


def test_a_value_that_is_no_tensor_says_so(bench: Bench) -> None:
    ((*errors,),) = bench.run(lambda actors, inp: allreduce.bind([each.whatever.bind(inp) for each in actors]), ("x",))
    assert all(isinstance(error, TypeError) and "brings a str" in str(error) for error in errors)


def test_long_complaints_travel_whole(bench: Bench) -> None:
    """Longer than what a frame holds, as is the layout of forty tensors."""

    def build(actors: list[Any], inp: Any) -> list[Any]:
        rows = allreduce.bind([[actor.make.bind(inp, (2, k), "float32") for k in range(40)] for actor in actors])
        odd = [actor.make.bind(inp, (2,) * (9 + rank), "float64") for rank, actor in enumerate(actors)]
        return [rows[0][39], rows[1][1], *allreduce.bind(odd)]

    ((last, first, *errors),) = bench.run(build, (1,))
    assert same(last, expected_reduction(all_makes(1, (2, 39), "float32"), ReduceOp.SUM))
    assert same(first, expected_reduction(all_makes(1, (2, 1), "float32"), ReduceOp.SUM))
    assert all(str((2,) * 11) in str(error) for error in errors)


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import crossfade\n"
        "crossfade.init(engine='inline')\n"
        "actors = [crossfade.remote(type('A', (), {'one': lambda self: 1})).remote() for _ in range(2)]\n"
        "nodes = crossfade.collective.allreduce.bind([actor.one.bind() for actor in actors])\n"
        "try:\n"
        "    crossfade.MultiOutputNode(nodes).compile()\n"
        "except crossfade.MissingDependency as error:\n"
        "    print(error.hint)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "crossfade[torch]" in ran.stdout


# Processes


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("overlap", "victim"), [(False, 2), (True, 0)])
def test_ch3_when_a_party_dies_the_others_are_told(local: Bench, overlap: bool, victim: int) -> None:
    """Everybody waits for one that is in the middle of a method; that one is killed."""
    with local.compiling():
        inp = crossfade.InputNode()
        mortal = crossfade.remote(Maker).remote(victim)
        rest = [actor for rank, actor in enumerate(local.actors) if rank != victim]
        actors = [*rest[:victim], mortal, *rest[victim:]]
        nodes = [
            a.sleep.bind(inp) if rank == victim else a.make.bind(1, (4,), "float32") for rank, a in enumerate(actors)
        ]
        graph = crossfade.MultiOutputNode(allreduce.bind(nodes)).compile(overlap=overlap)
        assert len([ref.get(timeout=30) for ref in graph.execute(0.0)]) == 3
        refs = graph.execute(30.0)
        with pytest.raises(crossfade.GetTimeoutError):
            refs[1].get(timeout=0.3)
        start_s = calm_s()
        crossfade.kill(mortal)
        with pytest.raises(crossfade.ActorDiedError, match=mortal._info.id):
            refs[1].get(timeout=30)
        assert calm_s() - start_s < 2.0
        graph.teardown()
        nodes = [actor.make.bind(1, (4,), "float32") for actor in rest]
        with crossfade.MultiOutputNode(allreduce.bind(nodes)).compile() as again:
            assert len([ref.get(timeout=30) for ref in again.execute()]) == 2
        assert calm_s() - start_s < 15.0


@pytest.mark.timeout(60)
def test_a_graph_is_torn_down_while_its_parties_wait_for_each_other(local: Bench) -> None:
    """Some have started a collective, one has not: they end together."""
    with local.compiling():

        def compiled() -> crossfade.CompiledGraph:
            inp, made = crossfade.InputNode(), (1, (4,), "float32")
            nodes = [a.sleep.bind(inp) if rank == 1 else a.make.bind(*made) for rank, a in enumerate(local.actors)]
            graph: crossfade.CompiledGraph = crossfade.MultiOutputNode(allreduce.bind(nodes)).compile(max_inflight=3)
            return graph

        graph = compiled()
        refs = [graph.execute(0.3) for _ in range(3)]
        start_s = calm_s()
        graph.teardown()
        assert calm_s() - start_s < 4.0
        del refs
        with compiled() as again:
            assert len([ref.get(timeout=30) for ref in again.execute(0.0)]) == 3


def test_statistics_and_the_timeline_show_collectives(local: Bench) -> None:
    with local.compiling():
        inp = crossfade.InputNode()
        outputs = allreduce.bind([actor.make.bind(inp, (1000,), "float32") for actor in local.actors])
        work = [actor.work.bind(200_000) for actor in local.actors]
        with crossfade.MultiOutputNode([*outputs, *work]).compile(record=True, overlap=True) as graph:
            for seed in range(3):
                crossfade.get(graph.execute(seed), timeout=60)
            name = local.actors[0]._info.id
            counters = graph.statistics().actors[name].channels["coll c0"]
            spans = [span for span in graph.timeline().spans if span.stream == "coll" and span.actor == name]
    assert (counters["num_values"], counters["num_bytes"]) == (3, 12_000)
    assert [(span.execution, span.what, span.kind) for span in spans] == [
        (e, "allreduce", "communicate") for e in range(3)
    ]


def test_two_graphs_share_actors(local: Bench) -> None:
    with local.compiling():
        graphs = []
        for op in ("sum", "max"):
            inp = crossfade.InputNode()
            outputs = allreduce.bind([actor.make.bind(inp, (4,), "int64") for actor in local.actors], op=op)
            graphs.append(crossfade.MultiOutputNode(outputs).compile())
        refs = [graph.execute(seed) for seed in range(5) for graph in graphs]
        for number, each in enumerate(refs):
            wanted = expected_reduction(all_makes(number // 2, (4,), "int64"), ReduceOp("max" if number % 2 else "sum"))
            assert all(same(ref.get(timeout=30), wanted) for ref in each)
        for graph in graphs:
            graph.teardown()


@pytest.mark.parametrize("overlap", [False, True])
def test_debug_mode_finds_a_result_that_was_changed(bench: Bench, overlap: bool) -> None:
    """Its actor changes it in one method and uses it in another."""

    def build(actors: list[Any], inp: Any) -> list[Any]:
        first, second = allreduce.bind([actor.make.bind(inp, (3,), "float32") for actor in actors[:2]])
        return [second, actors[0].spoil.bind(first), actors[0].whatever.bind(first)]

    ((whole, _, spoilt),) = bench.run(build, (1,), overlap=overlap, debug=True)
    assert same(whole, expected_reduction(all_makes(1, (3,), "float32")[:2], ReduceOp.SUM))
    assert isinstance(spoilt, crossfade.TaskError)
    assert "the value c0.0 of allreduce c0 was changed" in str(spoilt)


# Random graphs


@dataclass(frozen=True)
class Draw:
    """A graph with collectives: each step is a call on one actor or a collective of some, of values that they have."""

    steps: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]
    dtype: str
    transport: str
    is_by_copy: bool
    overlap: bool
    max_inflight: int


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    kinds = ("add", "fail", "allreduce", "allgather", "reducescatter", "broadcast", "buckets")
    step = st.tuples(
        st.sampled_from(kinds),
        st.permutations(range(NUM_ACTORS)).flatmap(lambda p: st.integers(2, NUM_ACTORS).map(lambda n: tuple(p[:n]))),
        st.lists(st.integers(0, 99), min_size=4, max_size=4).map(tuple),
        st.sampled_from(("sum", "min", "max")),
    )
    return Draw(
        tuple(draw(st.lists(step, min_size=1, max_size=6))),
        draw(st.sampled_from(("int64", "float32"))),
        draw(st.sampled_from(("auto", "gloo"))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(1, 4)),
    )


def build_random(drawn: Draw, actors: list[Any], inp: Any) -> list[Any]:
    """The leaves of the graph. All values are of 6 numbers, or are cut or repeated to that by the next call."""
    values: list[list[Any]] = [[actor.make.bind(inp, (6,), drawn.dtype)] for actor in actors]
    used: set[Any] = set()

    def take(rank: int, choice: int) -> Any:
        node = values[rank][choice % len(values[rank])]
        used.add(node)
        return node

    for kind, ranks, choices, op in drawn.steps:
        if kind == "add":
            other = take(ranks[1], choices[1]).with_tensor_transport(drawn.transport)
            made = {ranks[0]: [actors[ranks[0]].add.bind(take(ranks[0], choices[0]), other)]}
        elif kind == "fail":
            made = {ranks[0]: [actors[ranks[0]].fail_for.bind(inp, choices[0] % 5)]}
        elif kind == "buckets":
            rows = allreduce.bind([[take(r, choices[0]), take(r, choices[1])] for r in ranks], op=op)
            made = dict(zip(ranks, rows, strict=True))
        else:
            nodes = [take(rank, choice) for rank, choice in zip(ranks, choices, strict=False)]
            options = {"op": op} if "reduce" in kind else {}
            outputs = getattr(crossfade.collective, kind).bind(nodes, **options)
            made = {rank: [output] for rank, output in zip(ranks, outputs, strict=True)}
        for rank, nodes in made.items():
            values[rank] += nodes
    return [node for each in values for node in each if node not in used]


def comparable(value: Any) -> Any:
    """What must be the same on both engines: the value, or the error's type and what the method raised."""
    if isinstance(value, crossfade.TaskError):
        return type(value).__name__, repr(value.cause).replace("Maker", "")
    return value


@pytest.mark.timeout(600)
@settings(max_examples=30)
@given(drawn=draws())
def test_pl4_random_graphs_with_collectives_give_the_same_in_one_thread(both: tuple[Bench, Bench], drawn: Draw) -> None:
    check_random(both, drawn)


def check_random(both: tuple[Bench, Bench], drawn: Draw) -> None:
    """Small integers, in floats too, so sums are exact in any order."""
    inline, local = both
    results = [
        bench.run(
            lambda actors, inp: build_random(drawn, actors, inp),
            range(3),
            overlap=drawn.overlap,
            max_inflight=max(3, drawn.max_inflight),
        )
        for bench in (inline, replace(local, is_by_copy=drawn.is_by_copy))
    ]
    for rows in zip(*results, strict=True):
        for one, other in zip(*rows, strict=True):
            wanted, found = comparable(one), comparable(other)
            assert type(wanted) is type(found), (one, other)
            assert torch.equal(wanted, found) if isinstance(wanted, torch.Tensor) else wanted == found
