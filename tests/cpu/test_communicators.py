"""Communicators of the user's as transports: edges and collectives."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossfade
from crossfade.api.session import require
from crossfade.collective import allgather, allreduce, reducescatter
from crossfade.experimental.channel import CPUCommunicator
from crossfade.experimental.channel.torch_tensor_type import TorchTensorType
from tests.helpers.fifo_communicator import FifoCommunicator, Worker, helper_travels_by_value
from tests.helpers.kept_actors import ENGINES, crew_of, kept_crews
from tests.helpers.sessions import TORCH

torch = pytest.importorskip("torch")

__all__ = ["helper_travels_by_value"]

Remote = crossfade.remote(Worker)


Crew = tuple[Any, Any, Any]
"""Worker0 to Worker2, which tests share; they load torch once."""


kept = kept_crews({**ENGINES, "local": {"preload": TORCH}}, lambda: tuple(Remote.remote() for _ in range(3)))
crew = crew_of(*ENGINES)


def test_a_value_goes_there_and_back_by_the_communicator(crew: Crew, tmp_path: Path) -> None:
    a, b, _ = crew
    comm = FifoCommunicator(tmp_path, [a, b])
    with crossfade.InputNode() as inp:
        there = a.ones.bind(inp).with_tensor_transport(transport=comm)
        back = b.add.bind(there, there).with_type_hint(TorchTensorType(transport=comm))
        output = a.add.bind(back, there)
    with output.compile() as graph:
        refs = [graph.execute(n) for n in (1, 2, 5, 7)]
        assert [ref.get().tolist() for ref in refs] == [[3.0] * n for n in (1, 2, 5, 7)]
        assert graph.plan.channel["n0"].communicator == graph.plan.channel["n1"].communicator == "m0"
        assert crossfade.parse_plan(str(graph.plan)) == graph.plan
    counts = Counter(line.split(" ", 1)[1].split(" (")[0] for line in comm.log())
    expected = {"initialize": 2, "send": 8, "recv": 8, "destroy": 2}  # inline, all actors are in one thread
    assert counts == (expected if require().engine.name == "local" else {})


@pytest.mark.parametrize("crew", ["local"], indirect=True)
def test_tensors_of_a_value_go_one_by_one_and_the_rest_by_the_ring(crew: Crew, tmp_path: Path) -> None:
    a, b, _ = crew
    comm = FifoCommunicator(tmp_path, [b, a])  # ranks are not the order of the graph
    with b.total.bind(a.pair.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile() as graph:
        assert graph.execute(3).get() == [6.0, 3, (0, 3), "text"]
    assert sorted(comm.log()) == [
        "0 destroy",
        "0 initialize",
        "0 recv (3,) from 1",
        "0 recv (3,) from 1",
        "1 destroy",
        "1 initialize",
        "1 send (3,) to 0",
        "1 send (3,) to 0",
    ]


def test_readers_get_it_one_after_the_other_and_the_driver_by_shm(crew: Crew, tmp_path: Path) -> None:
    a, b, c = crew
    comm = FifoCommunicator(tmp_path, [a, b, c])
    with crossfade.InputNode() as inp:
        made = a.ones.bind(inp).with_tensor_transport(comm)
        passed = b.add.bind(made).with_tensor_transport(comm)
        output = crossfade.MultiOutputNode([c.add.bind(passed, made), made])
    with output.compile(max_inflight=3) as graph:
        for n in range(1, 8):
            total, first = crossfade.get(graph.execute(n))
            assert [total.tolist(), first.tolist()] == [[2.0] * n, [1.0] * n]
        by = [(spec.transport, spec.readers) for spec in graph.plan.channels if spec.value == "n0"]
        assert by == [("communicator", ("Worker1",)), ("communicator", ("Worker2",)), ("shm", ("driver",))]


def test_failures_and_values_without_tensors_go_by_the_ring(crew: Crew, tmp_path: Path) -> None:
    a, b, _ = crew
    comm = FifoCommunicator(tmp_path, [a, b])
    with b.echo.bind(a.maybe.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile() as graph:
        refs = [graph.execute(n) for n in range(6)]
        assert [refs[n].get() for n in (0, 2, 4)] == [0, 2, 4]
        with pytest.raises(ValueError, match="no 3 here"):
            refs[3].get()
        assert [refs[n].get().tolist() for n in (1, 5)] == [[1.0, 1.0], [5.0, 5.0]]


@pytest.mark.parametrize("overlap", [True, False])
def test_no_order_of_the_graph_makes_a_deadlock(crew: Crew, overlap: bool, tmp_path: Path) -> None:
    """Worker2 needs what came last before what came first, over an actor that needs both of Worker0's values."""
    a, b, c = crew
    comm = FifoCommunicator(tmp_path, [a, b, c])
    with crossfade.InputNode() as inp:
        first = a.ones.bind(inp).with_tensor_transport(comm)
        second = a.add.bind(first).with_tensor_transport("gloo")
        passed = b.add.bind(second).with_tensor_transport(comm)
        sums = allreduce.bind([a.add.bind(second), b.add.bind(passed), c.add.bind(passed)], transport=comm)
        output = crossfade.MultiOutputNode([c.add.bind(passed, first), b.add.bind(sums[1], first), a.add.bind(sums[0])])
    with output.compile(overlap=overlap) as graph:
        refs = [graph.execute(n) for n in (2, 3, 4)]
        found = [[value.tolist() for value in crossfade.get(ref)] for ref in refs]
    assert found == [[[2.0] * n, [4.0] * n, [3.0] * n] for n in (2, 3, 4)]


@pytest.mark.usefixtures("inline")
@given(st.integers(0, 2**32))
def test_every_graph_compiles_whatever_goes_by_communicators(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = Random(seed)
    actors = [Remote.remote() for _ in range(3)]
    comm = FifoCommunicator(tmp_path_factory.getbasetemp(), actors)
    made = [actors[0].ones.bind(crossfade.InputNode())]
    for _ in range(rng.randint(2, 8)):
        sources = rng.sample(made, min(len(made), rng.randint(1, 3)))
        if rng.random() < 0.25:
            nodes = [actor.add.bind(*sources) for actor in actors]
            new = allreduce.bind(nodes, transport=rng.choice([comm, "gloo"]))
        else:
            new = [rng.choice(actors).add.bind(*sources)]
        made += [node.with_tensor_transport(rng.choice([comm, comm, "gloo", "shm"])) for node in new]
    output = crossfade.MultiOutputNode(made)
    for overlap in (True, False):
        with output.compile(overlap=overlap, max_inflight=2) as graph:
            values = crossfade.get(graph.execute(2))
            assert crossfade.parse_plan(str(graph.plan)) == graph.plan
            assert graph.predicted_timeline(num_executions=2).spans
        assert len(values) == len(made)


@pytest.mark.usefixtures("inline")
def test_pl1_what_a_collective_gives_is_sent_before_what_is_made_and_sent_later() -> None:
    a, b = Remote.remote(), Remote.remote()
    with crossfade.InputNode() as inp:
        sums = allreduce.bind([a.ones.bind(inp), b.ones.bind(inp)], transport="gloo")
        given = sums[1].with_tensor_transport("gloo")
        made = b.ones.bind(inp).with_tensor_transport("gloo")
        output = a.add.bind(given, made, sums[0])
    with output.compile(overlap=True) as graph:
        assert graph.execute(2).get().tolist() == [5, 5]


def test_collectives_meet_as_ever_and_the_communicator_moves(crew: Crew, tmp_path: Path) -> None:
    a, b, _ = crew
    comm = FifoCommunicator(tmp_path, [a, b])
    with crossfade.InputNode() as inp:
        given = [a.ones.bind(inp[0]), b.ones.bind(inp[1])]
        sums = allreduce.bind(given, transport=comm)
        most = allreduce.bind([[given[0], sums[0]], [given[1], sums[1]]], op="max", transport=TorchTensorType(comm))
        both = allgather.bind(given, transport=comm)
        parts = reducescatter.bind(given, transport=comm)
        output = crossfade.MultiOutputNode([*sums, most[0][0], most[1][1], *both, *parts])
    with output.compile() as graph:
        assert "over communicator m0" in str(graph.plan)
        assert crossfade.parse_plan(str(graph.plan)) == graph.plan
        for _ in range(2):
            with pytest.raises(ValueError, match="do not fit together"):
                crossfade.get(graph.execute(2, 4))
            found = [value.tolist() for value in crossfade.get(graph.execute(2, 2))]
            assert found == [[2, 2], [2, 2], [1, 1], [2, 2], [1] * 4, [1] * 4, [2], [2]]


@pytest.mark.parametrize("crew", ["local"], indirect=True)
def test_an_actor_of_the_group_without_a_node_is_a_party_too(crew: Crew, tmp_path: Path) -> None:
    a, b, c = crew
    comm = FifoCommunicator(tmp_path, [a, b, c])
    with b.add.bind(a.ones.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile() as graph:
        assert graph.execute(2).get().tolist() == [1, 1]
        assert crossfade.get(c.echo.remote(5)) == 5
    assert Counter(line for line in comm.log() if "2" in line[:1]) == {"2 initialize": 1, "2 destroy": 1}


@pytest.mark.parametrize("crew", ["local"], indirect=True)
@pytest.mark.parametrize("num", [1, 3])
def test_a_teardown_with_executions_in_flight_leaves_nobody_behind(crew: Crew, num: int, tmp_path: Path) -> None:
    a, b, _ = crew
    comm = FifoCommunicator(tmp_path, [a, b])
    for _ in range(5):
        with crossfade.InputNode() as inp:
            made = a.ones.bind(inp).with_tensor_transport(comm)
            back = b.add.bind(made).with_tensor_transport(comm)
            sums = allreduce.bind([a.add.bind(back), back], transport=comm)
            graph = crossfade.MultiOutputNode(sums).compile()
        refs = [graph.execute(4) for _ in range(num)]
        graph.teardown(timeout=30)
        del refs
        assert crossfade.get([a.echo.remote(1), b.echo.remote(2)]) == [1, 2]
    assert Counter(line.split()[1] for line in comm.log())["destroy"] == 10


def test_two_graphs_do_not_share_actors_of_communicators(crew: Crew, tmp_path: Path) -> None:
    a, b, c = crew

    def compiled(writer: Any, reader: Any) -> Any:
        comm = FifoCommunicator(tmp_path, [writer, reader])
        return reader.echo.bind(writer.ones.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile()

    first = compiled(a, b)
    with pytest.raises(
        crossfade.GraphError, match=r"Worker1 take part in a communicator of another graph(.|\n)*\nhint: ."
    ):
        compiled(b, c)
    plain = c.echo.bind(a.ones.bind(crossfade.InputNode())).compile()
    assert plain.execute(1).get().tolist() == first.execute(1).get().tolist() == [1]
    first.teardown()
    second = compiled(b, c)
    assert second.execute(2).get().tolist() == [1, 1]
    del second
    gc.collect()
    assert compiled(a, b).execute(3).get().tolist() == [1, 1, 1]  # it waits until the actors have left what was dropped


def test_a_cpu_communicator_means_gloo(crew: Crew) -> None:
    a, b, _ = crew
    comm = CPUCommunicator(2, [a, b])
    assert [comm.get_rank(b), comm.get_world_size(), comm.get_transport_name()] == [1, 2, "cpu"]
    with crossfade.InputNode() as inp:
        made = a.ones.bind(inp).with_tensor_transport(comm)
        output = crossfade.MultiOutputNode(allreduce.bind([made, b.add.bind(made)], transport=comm))
    with output.compile() as graph:
        assert graph.plan.channel["n0"].transport == graph.plan.collectives[0].transport == "gloo"
        assert not graph.plan.communicators
        assert [value.tolist() for value in crossfade.get(graph.execute(2))] == [[2, 2], [2, 2]]
