"""A value that breaks the promise ``static_shape`` ends its execution, on every way that values go, and the graph goes on."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.api import session as sessions  # noqa: E402
from crossfade.channels.values.shapes import _by_pickler, shapes_of  # noqa: E402
from crossfade.collective import allgather  # noqa: E402
from crossfade.errors import StaticShapeError, TaskError  # noqa: E402
from tests.helpers.sessions import TORCH  # noqa: E402

torch.set_num_threads(1)


@dataclass
class Box:
    """An object with tensors among other things."""

    name: str
    tensor: Any
    more: Any = None


class Worker:
    """Makes tensors and says what it gets."""

    def __init__(self, stands_in_for_nccl: bool = False) -> None:
        torch.set_num_threads(1)
        self._num_runs = 0
        if stands_in_for_nccl:
            from crossfade.edges import nccl_link
            from tests.helpers.nccl_pair import StandIn

            nccl_link.nccl_group = StandIn

    def make(self, size: int) -> Any:
        if size < 0:
            raise KeyError(size)
        return torch.arange(size)

    def make_of(self, dtype: str, shape: Any) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def pack(self, sizes: Any) -> Any:
        tensors = [torch.arange(size) for size in sizes]
        return {"box": Box("x" * len(sizes), tensors[0], (tensors, {"last": tensors[-1]})), "number": len(sizes)}

    def either(self, value: Any) -> Any:
        return value

    def two(self, size: int) -> Any:
        return torch.arange(3), torch.arange(size)

    def unsendable(self, size: int) -> Any:
        return torch.arange(size), io.StringIO() if size == 1 else (_ for _ in ())

    def total(self, *values: Any) -> int:
        self._num_runs += 1
        return int(sum(value.sum() for value in values))

    def unpack(self, value: Any) -> int:
        return int(sum(tensor.sum() for tensor in value["box"].more[0]))

    def num_runs(self) -> int:
        return self._num_runs


Remote = crossfade.remote(Worker)


@pytest.fixture(scope="module", params=["local", "inline"])
def engine(request: Any) -> Iterator[str]:
    crossfade.init(engine=request.param, num_gpus=8, preload=TORCH)
    yield request.param
    crossfade.shutdown()


@pytest.fixture(autouse=True)
def torn_down(engine: str) -> Iterator[None]:
    """No graph outlives its test."""
    yield
    for opened in list(sessions.require().graphs):
        opened.teardown(timeout=30)


@pytest.fixture(scope="module")
def actors(engine: str) -> list[Any]:
    return [Remote.remote() for _ in range(3)]


@pytest.fixture(scope="module")
def gpu_actors(engine: str) -> list[Any]:
    """Actors with a GPU each, which a machine without any does not have."""
    is_stand_in = engine == "local" and not torch.cuda.is_available()
    return [Remote.options(num_gpus=1).remote(is_stand_in) for _ in range(2)]


def total(size: int) -> int:
    return size * (size - 1) // 2


def run(graph: Any, *args: Any, **kwargs: Any) -> Any:
    return crossfade.get(graph.execute(*args, **kwargs), timeout=30)


def refused(graph: Any, *args: Any, match: str = "static shape", **kwargs: Any) -> StaticShapeError:
    """The error in which an execution ends, that began."""
    ref = graph.execute(*args, **kwargs)
    with pytest.raises(StaticShapeError, match=match) as caught:
        crossfade.get(ref, timeout=30)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TaskError)
    return caught.value


def run_or_refused(graph: Any, size: int) -> None:
    """The first value had 100 elements."""
    if size == 100:
        assert run(graph, size) == total(size)
    else:
        refused(graph, size)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"debug": True}, {"max_inflight": 1}], ids=str)
@pytest.mark.parametrize("transport", ["auto", "shm", "gloo", "copy", "staged"])
def test_one_execution_fails_and_the_graph_goes_on(actors: list[Any], transport: str, options: dict[str, Any]) -> None:
    first, second, _ = actors
    num_before = crossfade.get(second.num_runs.remote())
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport, static_shape=True)
        graph = second.total.bind(made).compile(**options)
    for size in (100, 100, 90, 100, 0, 5000, 100):
        run_or_refused(graph, size)
    assert crossfade.get(second.num_runs.remote()) == num_before + 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs: see tests/gpu2")
@pytest.mark.parametrize("transport", [crossfade.Transport.NCCL, "auto", "staged"], ids=str)
def test_between_actors_with_gpus(gpu_actors: list[Any], transport: Any) -> None:
    first, second = gpu_actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport, static_shape=True)
        graph = second.total.bind(made).compile()
    for size in (100, 90, 100, 5000, 100):
        run_or_refused(graph, size)


def test_the_error_names_the_node_the_edge_and_both_shapes(actors: list[Any]) -> None:
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport("shm", static_shape=True)
        graph = crossfade.MultiOutputNode([second.total.bind(made), third.total.bind(made), made]).compile()
    assert "static n0" in str(graph.plan).splitlines()
    assert crossfade.parse_plan(str(graph.plan)) == graph.plan
    assert run(graph, 4)[:2] == [6, 6]
    for ref in graph.execute(5):  # every reader hears of it
        with pytest.raises(StaticShapeError) as caught:
            ref.get(timeout=30)
        error = caught.value
        names = [actor._info.id for actor in actors]
        assert str(error) == (
            f"{names[0]}.make (node n0), checking the shapes of what it returned, on actor {names[0]} raised StaticShapeError: "
            f"the value n0 of {names[0]}.make, read by {names[1]}.total (node n1), {names[2]}.total (node n2), the driver, is "
            "declared to have a static shape: expected tensors with shapes and dtypes [((4,), torch.int64)], as the first value "
            "had; found [((5,), torch.int64)]\n"
            "hint: leave static_shape out of with_tensor_transport for a value whose tensors change, or compile a graph for "
            "each shape"
        )
        assert error.actor == names[0]  # type: ignore[attr-defined]
        assert error.hint is not None
    assert run(graph, 4)[:2] == [6, 6]


def test_a_dtype_a_dimension_and_a_number_of_tensors(actors: list[Any]) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        made = first.make_of.bind(given.dtype, given.shape).with_tensor_transport(static_shape=True)
        graph = second.either.bind(made).compile()
    assert run(graph, dtype="float32", shape=(2, 3)).shape == (2, 3)
    refused(graph, dtype="float16", shape=(2, 3), match=r"found \[\(\(2, 3\), torch.float16\)\]")
    refused(graph, dtype="float32", shape=(3, 2))
    refused(graph, dtype="float32", shape=(6,))
    assert run(graph, dtype="float32", shape=(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("transport", ["shm", "gloo", "copy", "staged"])
def test_tensors_anywhere_in_a_value(actors: list[Any], transport: str) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        packed = first.pack.bind(given).with_tensor_transport(transport, static_shape=True)
        graph = second.unpack.bind(packed).compile()
    assert run(graph, [3, 4, 5]) == total(3) + total(4) + total(5)
    refused(graph, [3, 4, 6], match=r"\[\.\.\., \(\(4,\), torch.int64\), \(\(5,\), .*found \[\.\.\., .*\(\(6,\)")
    refused(graph, [4, 3, 5])
    refused(graph, [3, 4])
    refused(graph, [3, 4, 5, 5], match="4 in all")
    assert run(graph, [3, 4, 5]) == total(3) + total(4) + total(5)


def test_within_one_actor_and_several_readers_on_several_ways(actors: list[Any]) -> None:
    first, _, third = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport("copy", static_shape=True)
        made.with_tensor_transport("shm", reader=third)  # takes the promise not back
        graph = crossfade.MultiOutputNode([actor.total.bind(made) for actor in actors]).compile()
    num_before = crossfade.get([actor.num_runs.remote() for actor in actors])
    for size in (10, 11, 10):
        refs = graph.execute(size)
        for ref in refs:
            if size == 10:
                assert ref.get(timeout=30) == 45
            else:
                with pytest.raises(StaticShapeError):
                    ref.get(timeout=30)
    assert crossfade.get([actor.num_runs.remote() for actor in actors]) == [number + 2 for number in num_before]


def test_a_value_that_only_its_own_actor_reads(actors: list[Any]) -> None:
    first = actors[0]
    graph = first.total.bind(first.make.bind(crossfade.InputNode()).with_tensor_transport(static_shape=True)).compile()
    assert not {spec.value for spec in graph.plan.channels} & {"n0"}
    assert run(graph, 10) == 45
    refused(graph, 9)
    assert run(graph, 10) == 45


def test_executions_under_way_at_once(actors: list[Any]) -> None:
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport("copy", static_shape=True)
        graph = third.total.bind(second.either.bind(made).with_tensor_transport("gloo")).compile(max_inflight=6)
    refs = [graph.execute(size) for size in (7, 8, 7, 9, 8, 7)]
    for size, ref in zip((7, 8, 7, 9, 8, 7), refs, strict=True):
        if size == 7:
            assert ref.get(timeout=30) == 21
        else:
            with pytest.raises(StaticShapeError):
                ref.get(timeout=30)


def test_a_method_that_raised_or_could_not_be_sent_declares_nothing(actors: list[Any]) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport("shm", static_shape=True)
        graph = second.total.bind(made).compile()
    with pytest.raises(KeyError):
        run(graph, -1)
    assert run(graph, 4) == 6
    with pytest.raises(KeyError):
        run(graph, -1)
    refused(graph, 5)
    assert run(graph, 4) == 6
    with crossfade.InputNode() as given:
        made = first.unsendable.bind(given).with_tensor_transport("shm", static_shape=True)
        graph = second.either.bind(made).compile()
    with pytest.raises(TypeError, match="generator"):
        run(graph, 2)
    assert len(run(graph, 1)[0]) == 1


def test_one_of_several_returned_values(actors: list[Any]) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        one, other = first.two.options(num_returns=2).bind(given)
        other.with_tensor_transport(static_shape=True)
        graph = crossfade.MultiOutputNode([second.total.bind(one), second.total.bind(other)]).compile()
    assert graph.plan.static == ("n0.1",)
    assert run(graph, 4) == [3, 6]
    kept, broken = graph.execute(5)
    assert kept.get(timeout=30) == 3
    with pytest.raises(StaticShapeError, match=r"the value n0\.1 of"):
        broken.get(timeout=30)
    assert run(graph, 4) == [3, 6]


def test_what_comes_of_a_collective(actors: list[Any]) -> None:
    with crossfade.InputNode() as given:
        gathered = allgather.bind([actor.make.bind(given) for actor in actors[:2]])
        gathered[0].with_tensor_transport(static_shape=True)
        graph = crossfade.MultiOutputNode(
            [actor.total.bind(each) for actor, each in zip(actors, gathered, strict=False)]
        ).compile()
    assert run(graph, 4) == [12, 12]
    broken, free = graph.execute(5)
    with pytest.raises(StaticShapeError, match=r"the collective that makes c0\.0, checking"):
        broken.get(timeout=30)
    assert free.get(timeout=30) == 20
    assert run(graph, 4) == [12, 12]


def test_what_the_driver_gives(actors: list[Any]) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        given.x.with_tensor_transport(static_shape=True)
        graph = second.total.bind(first.either.bind(given.x), given.y).compile()
    assert run(graph, x=torch.ones(4), y=torch.ones(2)) == 6
    name = first._info.id
    for _ in range(3):
        with pytest.raises(
            StaticShapeError, match=rf"the graph's input \.x \(i0\), read by {name}\.either \(node n0\), is"
        ):
            graph.execute(x=torch.ones(5), y=torch.ones(2))
    assert run(graph, x=torch.ones(4), y=torch.ones(3)) == 7
    statistics = graph.statistics()
    assert (statistics.num_submitted, statistics.num_inflight) == (2, 0)


def test_an_input_that_could_not_be_given_declares_nothing(actors: list[Any]) -> None:
    with crossfade.InputNode() as given:
        given.with_tensor_transport(static_shape=True)
        graph = actors[0].either.bind(given).compile()
    with pytest.raises(TypeError, match="generator"):
        graph.execute((torch.ones(4), (_ for _ in ())))
    assert len(run(graph, (torch.ones(5), 1))[0]) == 5
    with pytest.raises(StaticShapeError):
        graph.execute((torch.ones(4), 1))
    with pytest.raises(StaticShapeError, match=r"found \[\]"):
        graph.execute(3)


def test_without_the_promise_shapes_may_change(actors: list[Any]) -> None:
    first, second, _ = actors
    graph = second.total.bind(first.make.bind(crossfade.InputNode())).compile()
    assert graph.plan.static == ()
    assert [run(graph, size) for size in (3, 9, 3)] == [3, 36, 3]


@pytest.mark.parametrize("engine", ["inline"], indirect=True)
@given(sizes=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=8))
def test_exactly_those_that_differ_from_the_first_fail(engine: str, sizes: list[list[int]]) -> None:
    one, other = Remote.remote(), Remote.remote()
    graph = other.unpack.bind(one.pack.bind(crossfade.InputNode()).with_tensor_transport(static_shape=True)).compile()
    with graph:
        for each in sizes:
            if each == sizes[0]:
                assert run(graph, each) == sum(map(total, each))
            else:
                refused(graph, each)


TENSORS = [torch.zeros(shape, dtype=dtype) for shape in ((), (0,), (2, 3)) for dtype in (torch.int8, torch.float32)]
LEAVES = st.one_of(st.sampled_from(TENSORS), st.integers(), st.text(max_size=3), st.none())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Box, st.just("box"), inner, inner),
    ),
    max_leaves=20,
)


@given(VALUES)
def test_shapes_are_found_as_the_pickler_finds_them(value: Any) -> None:
    assert shapes_of(value) == _by_pickler(value)
    copied = pickle.loads(pickle.dumps(value))
    assert shapes_of(copied) == _by_pickler(copied)


def test_shapes_of_what_takes_a_pickler() -> None:
    one, other = torch.zeros(2), torch.ones(3, 1, dtype=torch.int8)
    float2, int31 = (torch.Size([2]), torch.float32), (torch.Size([3, 1]), torch.int8)
    assert shapes_of([one, one, {"again": one}, other]) == (float2, int31)
    assert shapes_of({(1, 2): one}) == (float2,)
    assert shapes_of([[[[[[one]]]]], [other] * 100]) == (float2, int31)
    assert shapes_of(torch.nn.Parameter(one)) == (float2,)
    assert shapes_of((lambda: 3, one)) == (float2,)
    assert shapes_of(torch.eye(3).to_sparse()) == ((torch.Size([3, 3]), torch.float32),)
    assert shapes_of(b"x" * 3_000_000) == ()
    loop: list[Any] = [one]
    loop.append(loop)
    assert shapes_of(loop) == (float2,)
