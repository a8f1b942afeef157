"""What users of Ray Compiled Graph write, and what they met there: the rows that no other file tests, each by its name."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade import exceptions
from crossfade.dag import DAGNode, InputNode, MultiOutputNode
from crossfade.experimental.channel.torch_tensor_type import TorchTensorType


class Doer:
    """Does what tests need."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._local.value = "from the constructor"

    def echo(self, value: Any) -> Any:
        return value

    def pair(self, *values: Any, **named: Any) -> Any:
        return (values, named)

    def array(self, number: int) -> Any:
        return np.full(100_000, number)

    def ones(self, num: int) -> Any:
        import torch

        if num < 0:
            raise ValueError("no such tensor")
        return torch.ones(num)

    def total(self, *tensors: Any) -> float:
        return float(sum(tensor.sum() for tensor in tensors))

    def local_value(self, _: Any) -> Any:
        return self._local.value

    def read(self, path: str) -> str:
        """Returns once somebody opens the other end of a named pipe."""
        with open(path) as pipe:
            return pipe.read()


Actor = crossfade.remote(Doer)


@pytest.fixture
def actors() -> Iterator[list[Any]]:
    """Three actors of a session of their own."""
    crossfade.init()
    yield [Actor.remote() for _ in range(3)]
    crossfade.shutdown()


def test_whole_input_and_parts_mix_and_a_graph_may_do_without(actors: list[Any]) -> None:
    with InputNode() as inp:
        dag = actors[0].pair.bind(inp, inp[1], last=actors[1].echo.bind(inp[0]))
    with dag.compile() as graph:
        assert graph.execute((1, 2)).get() == (((1, 2), 2), {"last": 1})
    with actors[0].echo.bind(7).compile() as graph:
        assert graph.execute().get() == 7


def test_nodes_are_found_in_keywords_lists_tuples_and_dicts(actors: list[Any]) -> None:
    with InputNode() as inp:
        one = actors[0].echo.bind(inp)
        dag = actors[1].pair.bind([one, (inp, {"k": one})], named={"deep": [inp]})
    assert isinstance(dag, DAGNode)
    with dag.compile() as graph:
        assert graph.execute(3).get() == (([3, (3, {"k": 3})],), {"named": {"deep": [3]}})


def test_the_transport_may_be_said_in_both_spellings(actors: list[Any]) -> None:
    wishes: Any = {"transport": "gloo", "_static_shape": True, "_direct_return": True}
    for is_older in (False, True):
        with InputNode() as inp:
            ones = actors[0].ones.bind(inp)
            ones = ones.with_type_hint(TorchTensorType(**wishes)) if is_older else ones.with_tensor_transport(**wishes)
            dag = actors[1].total.bind(ones)
        with dag.experimental_compile() as graph:
            assert graph.plan.channel["n0"].transport is crossfade.Transport.GLOO
            assert graph.execute(12).get() == 12.0


def test_every_argument_of_experimental_compile_is_accepted(actors: list[Any]) -> None:
    with InputNode() as inp:
        dag = actors[0].echo.bind(inp)
    defaults = {
        "_submit_timeout": 10.0,
        "_buffer_size_bytes": 1_000_000,
        "enable_asyncio": False,
        "_max_inflight_executions": 10,
        "_max_buffered_results": 1000,
        "_overlap_gpu_communication": False,
        "_default_communicator": "create",
    }
    for name, value in defaults.items():
        with dag.experimental_compile(**{name: value}) as graph:
            assert graph.execute(1).get() == 1
    with dag.experimental_compile(**dict.fromkeys(defaults)) as graph:
        assert graph.execute(1).get() == 1
    with pytest.raises(TypeError, match="unknown option of compile 'max_inflights'\nhint: did you mean 'max_inflight'"):
        dag.experimental_compile(max_inflights=1)


def test_teardown_may_kill_the_actors_and_visualize_draws(actors: list[Any], tmp_path: Path) -> None:
    with InputNode() as inp:
        graph = actors[0].echo.bind(inp).experimental_compile()
    assert "Doer0.echo" in graph.visualize(format="ascii")
    graph.visualize(str(tmp_path / "graph"), format="dot")
    assert "Doer0.echo" in (tmp_path / "graph.dot").read_text()
    graph.teardown(kill_actors=True)
    with pytest.raises(exceptions.RayActorError):
        actors[0].echo.remote(1).get()
    assert actors[1].echo.remote(1).get() == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("RayError", "TaskError"),
        ("RayError", "GetTimeoutError"),
        ("RayTaskError", "TaskError"),
        ("RayActorError", "ActorDiedError"),
        ("RayActorError", "ActorStartError"),
        ("ActorDiedError", "ActorDiedError"),
        ("RayChannelError", "ChannelTimeout"),
        ("RayChannelError", "ChannelBroken"),
        ("RayChannelTimeoutError", "GetTimeoutError"),
        ("RayChannelTimeoutError", "ChannelTimeout"),
        ("GetTimeoutError", "GetTimeoutError"),
        ("RayCgraphCapacityExceeded", "CapacityExceeded"),
    ],
)
def test_errors_have_rays_names_as_aliases(theirs: str, ours: str) -> None:
    assert issubclass(getattr(crossfade, ours), getattr(exceptions, theirs))
    assert theirs in exceptions.__all__


@pytest.mark.timeout(30)
def test_dropping_a_reference_in_flight_never_blocks(actors: list[Any], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "file").write_text("next")
    with InputNode() as inp:
        dag = actors[0].read.bind(inp)
    with dag.compile() as graph:
        ref = graph.execute(str(pipe))
        del ref  # the method waits for us to open the pipe: a drop that waited would never end
        late = graph.execute(str(tmp_path / "file"))
        pipe.write_text("now")
        assert late.get(timeout=20) == "next"


@pytest.mark.timeout(60)
def test_kept_arrays_stay_valid_and_never_block_the_ring(actors: list[Any]) -> None:
    with InputNode() as inp:
        dag = actors[0].array.bind(inp)
    with dag.compile(max_inflight=3) as graph:
        kept = [graph.execute(number).get(timeout=20) for number in range(50)]
    crossfade.shutdown()
    assert [int(array[0]) for array in kept] == [int(array[-1]) for array in kept] == list(range(50))


def test_fan_in_of_any_mix_of_tensors_works(actors: list[Any]) -> None:
    with InputNode() as inp:
        by_gloo = actors[0].ones.bind(inp).with_tensor_transport("gloo")
        by_shm = actors[1].ones.bind(inp).with_tensor_transport("shm")
        own = actors[2].ones.bind(inp)
        dag = actors[2].total.bind(by_gloo, by_shm, own, actors[1].ones.bind(inp).with_tensor_transport("gloo"))
    for overlap in (True, False):
        with dag.compile(overlap=overlap) as graph:
            refs = [graph.execute(number) for number in range(1, 6)]
            assert crossfade.get(refs) == [4.0, 8.0, 12.0, 16.0, 20.0]


def test_overlap_never_moves_a_read_before_the_write_that_it_needs(actors: list[Any]) -> None:
    a, b, _ = actors
    with InputNode() as inp:
        there = a.ones.bind(inp).with_tensor_transport("gloo")
        back = b.echo.bind(there).with_tensor_transport("gloo")
        again = a.echo.bind(back).with_tensor_transport("gloo")
        dag = MultiOutputNode([b.total.bind(again, there), a.total.bind(back)])
    with dag.experimental_compile(_overlap_gpu_communication=True) as graph:
        assert [crossfade.get(graph.execute(number)) for number in range(1, 5)] == [
            [2.0 * n, 1.0 * n] for n in range(1, 5)
        ]


def test_an_exception_in_a_method_with_static_shapes_leaves_the_graph_going(actors: list[Any]) -> None:
    for transport in ("shm", "gloo"):
        with InputNode() as inp:
            ones = actors[0].ones.bind(inp).with_tensor_transport(transport, _static_shape=True, _direct_return=True)
            dag = actors[1].total.bind(ones)
        with dag.compile() as graph:
            assert graph.execute(5).get() == 5.0
            with pytest.raises(ValueError, match="no such tensor"):
                graph.execute(-1).get()
            assert graph.execute(5).get() == 5.0


def test_what_the_constructor_left_on_its_thread_is_there(actors: list[Any]) -> None:
    with InputNode() as inp:
        dag = actors[0].local_value.bind(inp)
    with dag.compile() as graph:
        assert graph.execute(0).get() == "from the constructor"
    assert actors[0].local_value.remote(0).get() == "from the constructor"


def test_one_value_for_three_readers_is_written_once(actors: list[Any]) -> None:
    source = Actor.remote()
    with InputNode() as inp:
        array = source.array.bind(inp)
        dag = MultiOutputNode([actor.echo.bind(array) for actor in actors])
    with dag.compile() as graph:
        assert [int(each[0]) for each in crossfade.get(graph.execute(7))] == [7, 7, 7]
        written = graph.statistics().actors["Doer3"].channels
        assert set(written) == {"read i0", "write n0"}
        assert written["write n0"]["num_values"] == 1
