"""What users of Ray Compiled Graph write, and what they met there: each by its name, here or where `ELSEWHERE` says."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade import exceptions
from crossfade.dag import DAGNode, InputNode, MultiOutputNode
from crossfade.experimental.channel.torch_tensor_type import TorchTensorType
from tests.helpers import doers
from tests.helpers.kept_actors import crew_of, kept_crews


class Doer(doers.Doer):
    def __init__(self) -> None:
        self._local = threading.local()
        self._local.value = "from the constructor"

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

    async def soon(self, value: Any) -> Any:
        return value


Actor = crossfade.remote(Doer)

TESTS = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "programs in Ray's style, with only the imports changed": "cpu/test_ray_surface.py::test_a_program_in_rays_style_runs",
    "collectives on CPU tensors, all reductions": "cpu/test_collectives.py::test_reductions_of_every_dtype",
    "lists of lists for allreduce": "cpu/test_collectives.py::test_buckets_of_several_dtypes_and_shapes",
    "execute_async": "cpu/test_asyncio.py::test_a_thousand_awaited_at_once",
    "a get that timed out": "cpu/test_local_engine.py::test_a_get_that_timed_out_may_be_repeated",
    "no hidden time-out": "cpu/test_local_engine.py::test_submit_timeout",
    "several graphs on an actor, a graph compiled again": (
        "cpu/test_local_engine.py::test_several_graphs_share_actors_and_one_graph_compiles_again"
    ),
    "teardown says what it waits for": "cpu/test_teardown.py::test_teardown_says_what_it_waits_for",
    "an actor killed while idle": (
        "cpu/test_faults.py::test_an_actor_killed_while_idle_is_named_with_its_signal_and_who_waited"
    ),
    "a killed driver leaves nothing": "cpu/test_faults.py::test_no_actor_outlives_its_driver_whatever_it_does",
    "compile and teardown leak nothing": "cpu/test_edges_leaks.py::test_graphs_through_shared_memory_leave_nothing",
    "overlap across executions, sends too": "unit/test_schedule.py::test_golden_plans",
    "overlap of collectives": "unit/test_collectives.py::test_golden_plans",
    "methods on the main thread": "cpu/test_local_engine.py::test_methods_run_on_the_main_thread",
    "deadlocks are found at compile time": (
        "unit/test_plan_validate_proof.py::test_pl1_to_pl4_the_verdict_is_that_of_all_interleavings"
    ),
}


kept = kept_crews({"local": {}}, lambda: tuple(Actor.remote() for _ in range(3)))
actors = crew_of("local")
"""Three actors that are processes."""


@pytest.fixture
def own() -> Iterator[list[Any]]:
    """Two actors of a session that a test may end."""
    crossfade.init()
    yield [Actor.remote() for _ in range(2)]
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


def test_the_transport_may_differ_by_reader(actors: list[Any]) -> None:
    with InputNode() as inp:
        ones = actors[0].ones.bind(inp).with_tensor_transport("gloo", reader=actors[1])
        dag = MultiOutputNode([reader.total.bind(ones) for reader in actors[1:3]])
    with dag.experimental_compile() as graph:
        ways = {channel.readers: channel.transport for channel in graph.plan.channels if channel.value == "n0"}
        assert sorted(ways.values()) == [crossfade.Transport.GLOO, crossfade.Transport.SHM]
        assert crossfade.get(graph.execute(12)) == [12.0, 12.0]


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


def test_teardown_may_kill_the_actors_and_visualize_draws(own: list[Any], tmp_path: Path) -> None:
    with InputNode() as inp:
        graph = own[0].echo.bind(inp).experimental_compile()
    assert "Doer0.echo" in graph.visualize(format="ascii")
    graph.visualize(str(tmp_path / "graph"), format="dot")
    assert "Doer0.echo" in (tmp_path / "graph.dot").read_text()
    graph.teardown(kill_actors=True)
    with pytest.raises(exceptions.RayActorError):
        own[0].echo.remote(1).get()
    assert own[1].echo.remote(1).get() == 1


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
def test_dropping_a_reference_in_flight_never_blocks(actors: list[Any], pipe: Path, tmp_path: Path) -> None:
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
def test_kept_arrays_stay_valid_and_never_block_the_ring(own: list[Any]) -> None:
    with InputNode() as inp:
        dag = own[0].array.bind(inp)
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
        written = graph.statistics().actors[source._info.id].channels
        assert set(written) == {"read i0", "write n0"}
        assert written["write n0"]["num_values"] == 1


def test_an_async_method_is_refused_with_a_hint(actors: list[Any]) -> None:
    with pytest.raises(AttributeError, match=r"Doer0\.soon is an async method.*\nhint: make it a plain method"):
        actors[0].soon.bind(1)
    assert not hasattr(actors[0], "soon")


@pytest.mark.timeout(30)
def test_an_idle_graph_takes_no_core(actors: list[Any]) -> None:
    with InputNode() as inp:
        dag = actors[2].echo.bind(actors[1].echo.bind(actors[0].echo.bind(inp)))
    pids = [os.getpid(), *crossfade.get([actor.pid.remote() for actor in actors])]
    with dag.compile() as graph:
        for number in range(100):
            assert graph.execute(number).get() == number
        used_s = [_cpu_in_a_second(pids) for _ in range(3)]  # whatever else this process does, one of them is quiet
        assert min(used_s) <= 0.03
        assert graph.execute(1).get() == 1


def _cpu_in_a_second(pids: list[int]) -> float:
    """What processes use while nothing is asked of them."""
    gc.collect()
    time.sleep(0.5)
    before = sum(map(_cpu_s, pids))
    time.sleep(1.0)  # what is measured is this time of doing nothing
    return sum(map(_cpu_s, pids)) - before


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("row", sorted(ELSEWHERE))
def test_the_rows_that_other_files_test_are_there(row: str) -> None:
    file, _, name = ELSEWHERE[row].partition("::")
    assert re.search(rf"(?m)^def {name}\b", (TESTS / file).read_text()), f"{ELSEWHERE[row]} is gone"
