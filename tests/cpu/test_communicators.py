"""Communicators of the user's as transports: edges, collectives, errors, deaths, and what is refused."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossfade
from crossfade.collective import allgather, allreduce, broadcast, reducescatter
from crossfade.experimental.channel import CPUCommunicator
from crossfade.experimental.channel.torch_tensor_type import TorchTensorType
from tests.helpers.fifo_communicator import FifoCommunicator

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True, scope="module")
def the_helper_travels_by_value() -> Any:
    import cloudpickle

    from tests.helpers import fifo_communicator

    cloudpickle.register_pickle_by_value(fifo_communicator)
    yield
    cloudpickle.unregister_pickle_by_value(fifo_communicator)


class Worker:
    def ones(self, n: int) -> Any:
        import torch

        return torch.ones(n)

    def add(self, *tensors: Any) -> Any:
        return sum(tensors)

    def pair(self, n: int) -> Any:
        import torch

        return {"a": torch.full((n,), 2.0), "b": (torch.arange(n), torch.empty(0, 3)), "c": "text"}

    def total(self, value: Any) -> list[Any]:
        return [value["a"].sum().item(), value["b"][0].sum().item(), tuple(value["b"][1].shape), value["c"]]

    def maybe(self, n: int) -> Any:
        import torch

        if n == 3:
            raise ValueError("no 3 here")
        return torch.full((2,), float(n)) if n % 2 else n

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()


Remote = crossfade.remote(Worker)


def workers(num: int) -> list[Any]:
    return [Remote.remote() for _ in range(num)]


def test_a_value_goes_there_and_back_by_the_communicator(engine: str, tmp_path: Path) -> None:
    a, b = workers(2)
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
    assert counts == (expected if engine == "local" else {})


@pytest.mark.usefixtures("local")
def test_tensors_of_a_value_go_one_by_one_and_the_rest_by_the_ring(tmp_path: Path) -> None:
    a, b = workers(2)
    comm = FifoCommunicator(tmp_path, [b, a])  # ranks are not the order of the graph
    with crossfade.InputNode() as inp:
        output = b.total.bind(a.pair.bind(inp).with_tensor_transport(comm))
    with output.compile() as graph:
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


def test_readers_get_it_one_after_the_other_and_the_driver_by_shm(engine: str, tmp_path: Path) -> None:
    a, b, c = workers(3)
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


def test_failures_and_values_without_tensors_go_by_the_ring(engine: str, tmp_path: Path) -> None:
    a, b = workers(2)
    comm = FifoCommunicator(tmp_path, [a, b])
    with crossfade.InputNode() as inp:
        output = b.echo.bind(a.maybe.bind(inp).with_tensor_transport(comm))
    with output.compile() as graph:
        refs = [graph.execute(n) for n in range(6)]
        assert [refs[n].get() for n in (0, 2, 4)] == [0, 2, 4]
        with pytest.raises(ValueError, match="no 3 here"):
            refs[3].get()
        assert [refs[n].get().tolist() for n in (1, 5)] == [[1.0, 1.0], [5.0, 5.0]]


@pytest.mark.parametrize("overlap", [True, False])
def test_no_order_of_the_graph_makes_a_deadlock(engine: str, overlap: bool, tmp_path: Path) -> None:
    """Worker2 needs what came last before what came first, over an actor that needs both of Worker0's values."""
    a, b, c = workers(3)
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
    actors = workers(3)
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
    a, b = workers(2)
    with crossfade.InputNode() as inp:
        sums = allreduce.bind([a.ones.bind(inp), b.ones.bind(inp)], transport="gloo")
        given = sums[1].with_tensor_transport("gloo")
        made = b.ones.bind(inp).with_tensor_transport("gloo")
        output = a.add.bind(given, made, sums[0])
    with output.compile(overlap=True) as graph:
        assert graph.execute(2).get().tolist() == [5, 5]


def test_collectives_meet_as_ever_and_the_communicator_moves(engine: str, tmp_path: Path) -> None:
    a, b = workers(2)
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


@pytest.mark.usefixtures("local")
def test_an_actor_of_the_group_without_a_node_is_a_party_too(tmp_path: Path) -> None:
    a, b, c = workers(3)
    comm = FifoCommunicator(tmp_path, [a, b, c])
    with crossfade.InputNode() as inp:
        output = b.add.bind(a.ones.bind(inp).with_tensor_transport(comm))
    with output.compile() as graph:
        assert graph.execute(2).get().tolist() == [1, 1]
        assert crossfade.get(c.echo.remote(5)) == 5
    assert Counter(line for line in comm.log() if "2" in line[:1]) == {"2 initialize": 1, "2 destroy": 1}


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("num", [1, 3])
def test_a_teardown_with_executions_in_flight_leaves_nobody_behind(num: int, tmp_path: Path) -> None:
    a, b = workers(2)
    comm = FifoCommunicator(tmp_path, [a, b])
    for _ in range(5):
        with crossfade.InputNode() as inp:
            made = a.ones.bind(inp).with_tensor_transport(comm)
            back = b.add.bind(made).with_tensor_transport(comm)
            sums = allreduce.bind([a.add.bind(back), back], transport=comm)
            output = crossfade.MultiOutputNode(sums)
        graph = output.compile()
        refs = [graph.execute(4) for _ in range(num)]
        graph.teardown(timeout=30)
        del refs
        assert crossfade.get([a.echo.remote(1), b.echo.remote(2)]) == [1, 2]
    assert Counter(line.split()[1] for line in comm.log())["destroy"] == 10


# Errors and deaths


class _Raising(FifoCommunicator):
    """Raises in one of its methods, on one rank."""

    def __init__(self, folder: Path, actors: list[Any], method: str, rank: int) -> None:
        super().__init__(folder, actors)
        self._raises = method, rank

    def _check(self, method: str) -> None:
        if (method, self._rank) == self._raises:
            raise OSError("the cable is out")

    def initialize(self, rank: int) -> None:
        super().initialize(rank)
        self._check("initialize")

    def send(self, value: Any, peer_rank: int) -> None:
        self._check("send")
        super().send(value, peer_rank)

    def recv(self, shape: tuple[int, ...], dtype: Any, peer_rank: int, allocator: Any = None) -> Any:
        self._check("recv")
        return super().recv(shape, dtype, peer_rank, allocator)

    def allreduce(self, send_buf: Any, recv_buf: Any, op: Any) -> None:
        self._check("allreduce")
        super().allreduce(send_buf, recv_buf, op)

    def destroy(self) -> None:
        super().destroy()
        self._check("destroy")


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(("method", "rank"), [("send", 0), ("recv", 1), ("allreduce", 1)])
def test_what_a_communicator_raises_ends_the_graph(method: str, rank: int, tmp_path: Path) -> None:
    a, b = workers(2)
    comm = _Raising(tmp_path, [a, b], method, rank)
    with crossfade.InputNode() as inp:
        made = a.ones.bind(inp).with_tensor_transport(comm)
        sums = allreduce.bind([made, b.add.bind(made)], transport=comm)
        graph = crossfade.MultiOutputNode(sums).compile()
    with pytest.raises(
        crossfade.ActorError, match=rf"Worker{rank} cannot .*_Raising\.{method} raised OSError: the cable"
    ):
        crossfade.get(graph.execute(2))
    assert crossfade.get([a, b][rank].echo.remote(1)) == 1
    graph.teardown(kill_actors=True)


@pytest.mark.usefixtures("local")
def test_what_initialize_raises_comes_out_of_compile_and_what_destroy_does_is_printed(tmp_path: Path) -> None:
    a, b = workers(2)
    comm = _Raising(tmp_path, [a, b], "initialize", 1)
    with pytest.raises(OSError, match="the cable is out"):
        b.add.bind(a.ones.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile()
    comm = _Raising(tmp_path, [a, b], "destroy", 1)
    with b.add.bind(a.ones.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile() as graph:
        assert graph.execute(1).get().tolist() == [1]
    assert comm.log().count("0 destroy") == 2


class _Waiting(_Raising):
    """Rank 0 waits in its ``initialize`` for rank 1, which has raised in its own."""

    def initialize(self, rank: int) -> None:
        super().initialize(rank)
        if rank == 0:
            self._take(1, 1)


@pytest.mark.usefixtures("local")
def test_nobody_waits_for_an_initialize_that_waits_for_one_that_raised(tmp_path: Path) -> None:
    a, b = workers(2)
    comm = _Waiting(tmp_path, [a, b], "initialize", 1)
    with pytest.raises(OSError, match="the cable is out"):
        b.add.bind(a.ones.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile()


@pytest.mark.usefixtures("local")
def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    a, b = workers(2)
    comm = FifoCommunicator(tmp_path, [a, b])
    comm.lock = threading.Lock()  # type: ignore[attr-defined]
    output = b.add.bind(a.ones.bind(2).with_tensor_transport(comm))
    with pytest.raises(TypeError) as caught:
        output.compile()
    assert any("FifoCommunicator cannot be pickled\nhint: " in note for note in caught.value.__notes__)


class _Odd(FifoCommunicator):
    def recv(self, shape: tuple[int, ...], dtype: Any, peer_rank: int, allocator: Any = None) -> Any:
        return super().recv(shape, dtype, peer_rank, allocator).double()


@pytest.mark.usefixtures("local")
def test_a_tensor_of_another_kind_is_the_value_s_error(tmp_path: Path) -> None:
    a, b = workers(2)
    output = b.echo.bind(a.ones.bind(crossfade.InputNode()).with_tensor_transport(_Odd(tmp_path, [a, b])))
    with output.compile() as graph:
        for _ in range(2):
            with pytest.raises(
                TypeError, match=r"_Odd\.recv gave a torch\.float64 \(2,\), not a torch\.float32 \(2,\)"
            ):
                graph.execute(2).get()


class _Stuck(FifoCommunicator):
    """Tells in a pipe that it is about to receive."""

    def recv(self, shape: tuple[int, ...], dtype: Any, peer_rank: int, allocator: Any = None) -> Any:
        (self._folder / "receiving").write_text("!")
        return super().recv(shape, dtype, peer_rank, allocator)

    def send(self, value: Any, peer_rank: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("local")
def test_a_death_is_told_while_the_other_blocks_in_recv(tmp_path: Path) -> None:
    a, b = workers(2)
    comm = _Stuck(tmp_path, [a, b])
    os.mkfifo(tmp_path / "receiving")
    pid = crossfade.get(b.pid.remote())
    output = b.echo.bind(a.ones.bind(crossfade.InputNode()).with_tensor_transport(comm))
    graph = output.compile()
    ref = graph.execute(2)
    (tmp_path / "receiving").read_text()
    start = time.monotonic()
    with pytest.raises(crossfade.ActorDiedError, match=r"Worker0 .*SIGKILL"):
        ref.get(timeout=30)
    assert time.monotonic() - start < 5  # a second, and what other tests take
    crossfade.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# What is refused


def refused(make: Callable[[], Any], problem: str, kind: type[Exception] = crossfade.GraphError) -> None:
    with pytest.raises(kind, match=f"{problem}(.|\n)*\nhint: ."):
        make()


@pytest.mark.usefixtures("inline")
def test_what_does_not_fit_a_group_is_refused(tmp_path: Path) -> None:
    a, b, c = workers(3)
    comm = FifoCommunicator(tmp_path, [a, b])

    def edge(writer: Any, reader: Any, by: Any, **more: Any) -> Any:
        return reader.echo.bind(writer.ones.bind(2).with_tensor_transport(by, **more))

    refused(
        lambda: edge(a, c, comm).compile(),
        "from Worker0 to Worker2, in whose group Worker2 is not: it has Worker0, Worker1",
    )
    refused(lambda: edge(c, a, comm).compile(), "in whose group Worker2 is not")
    refused(lambda: edge(a, b, comm, device="cuda").compile(), "and for the device 'cuda'")
    refused(
        lambda: edge(a, b, "communicator").compile(), "'communicator', which does not exist", crossfade.UnknownTransport
    )
    refused(lambda: edge(a, b, object()), "is not the name of a transport", TypeError)
    nodes = [each.ones.bind(2) for each in (a, b, c)]
    refused(lambda: allreduce.bind(nodes, transport=comm)[0].compile(), "whose group is Worker0, Worker1")
    refused(
        lambda: allgather.bind(nodes[1::-1], transport=comm)[0].compile(),
        "whose ranks are in the order Worker0, Worker1",
    )
    refused(lambda: broadcast.bind([nodes[0], b], transport=comm)[0].compile(), "communicators have no broadcast")
    refused(lambda: allreduce.bind(nodes, transport=object()), "is not the name of a transport", TypeError)
    refused(lambda: edge(a, b, FifoCommunicator(tmp_path, [a, "b"])).compile(), "gives 'b', which is no actor")

    class Twice(FifoCommunicator):
        def get_rank(self, actor: Any) -> int:
            return 0

    refused(lambda: edge(a, b, Twice(tmp_path, [a, b])).compile(), "gives the ranks 0 to 2 actors")
    stale = FifoCommunicator(tmp_path, [a, b])
    crossfade.shutdown()
    crossfade.init(engine="inline")
    a, b = workers(2)
    refused(lambda: edge(a, b, stale).compile(), "belongs to another session")


def test_two_graphs_do_not_share_actors_of_communicators(engine: str, tmp_path: Path) -> None:
    a, b, c = workers(3)

    def compiled(writer: Any, reader: Any) -> Any:
        comm = FifoCommunicator(tmp_path, [writer, reader])
        return reader.echo.bind(writer.ones.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile()

    first = compiled(a, b)
    refused(lambda: compiled(b, c), "Worker1 take part in a communicator of another graph")
    plain = c.echo.bind(a.ones.bind(crossfade.InputNode())).compile()
    assert plain.execute(1).get().tolist() == first.execute(1).get().tolist() == [1]
    first.teardown()
    second = compiled(b, c)
    assert second.execute(2).get().tolist() == [1, 1]
    del second
    gc.collect()
    assert compiled(a, b).execute(3).get().tolist() == [1, 1, 1]  # it waits until the actors have left what was dropped


def test_a_cpu_communicator_means_gloo(engine: str) -> None:
    a, b = workers(2)
    comm = CPUCommunicator(2, [a, b])
    assert [comm.get_rank(b), comm.get_world_size(), comm.get_transport_name()] == [1, 2, "cpu"]
    with crossfade.InputNode() as inp:
        made = a.ones.bind(inp).with_tensor_transport(comm)
        output = crossfade.MultiOutputNode(allreduce.bind([made, b.add.bind(made)], transport=comm))
    with output.compile() as graph:
        assert graph.plan.channel["n0"].transport == graph.plan.collectives[0].transport == "gloo"
        assert not graph.plan.communicators
        assert [value.tolist() for value in crossfade.get(graph.execute(2))] == [[2, 2], [2, 2]]
