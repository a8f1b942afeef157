"""Communicators of the user's as transports: what they raise, deaths, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.collective import allgather, allreduce, broadcast
from tests.helpers.fifo_communicator import FifoCommunicator, Worker, helper_travels_by_value
from tests.helpers.sessions import TORCH, opened

torch = pytest.importorskip("torch")

__all__ = ["helper_travels_by_value"]

Remote = crossfade.remote(Worker)

local = opened(preload=TORCH)


def workers(num: int) -> list[Any]:
    return [Remote.remote() for _ in range(num)]


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
    graph = b.echo.bind(a.ones.bind(crossfade.InputNode()).with_tensor_transport(comm)).compile()
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
