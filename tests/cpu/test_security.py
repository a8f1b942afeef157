"""Who can reach what: docs/security.md, as tests with live actors."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import pytest

import crossfade
from crossfade.api import session as sessions
from crossfade.host.frames import FrameError, Sealer, new_key
from crossfade.host.memory import Memory
from crossfade.host.sockets import Connection, hand_over, take_over
from tests.helpers.bells import new_bell
from tests.helpers.doers import Doer
from tests.helpers.listening import Bound, bound_sockets

pytestmark = pytest.mark.usefixtures("local")


class Echo(Doer):
    def write_to_sockets(self, data: bytes) -> int:
        """What a program does that writes to wrong descriptors."""
        return sum(os.write(fd, data) > 0 for fd in _sockets())

    def close_sockets(self) -> None:
        for fd in _sockets():
            os.close(fd)


def _sockets() -> list[int]:
    """The descriptors of this process that are sockets, whatever their numbers."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the folder itself is gone
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                found.append(fd)
    return sorted(found)


RemoteEcho = crossfade.remote(Echo)


def _control_socket(actor_index: int) -> socket.socket:
    """The driver's end of an actor's control socket, taken from under its connection."""
    engine: Any = sessions.require().engine
    process = list(engine.processes.living.values())[actor_index]
    return socket.socket(fileno=os.dup(process.connection.fileno()))


def _echo_graph(actor: Any) -> Any:
    return actor.echo.bind(crossfade.InputNode()).compile()


GARBAGE = {
    "noise": random.Random(0).randbytes(5000),
    "zeros": bytes(200),
    "a wrong key": b"".join(Sealer(new_key(), "driver").seal(b"")),
    "an absurd length": struct.pack("<QI", (1 << 64) - 1, 0) + bytes(16),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_an_actor_that_is_sent_garbage_stops_and_the_others_go_on(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    victim, other = RemoteEcho.remote(), RemoteEcho.remote()
    graphs = [_echo_graph(victim), _echo_graph(other)]
    assert [graph.execute(1).get(timeout=30) for graph in graphs] == [1, 1]
    with _control_socket(0) as sock:
        sock.send(GARBAGE[kind])
    with pytest.raises(crossfade.ActorDiedError, match="exited with code 1"):
        crossfade.get(victim.echo.remote(2))
    with pytest.raises(crossfade.ActorDiedError):
        graphs[0].execute(2).get(timeout=30)
    assert graphs[1].execute(3).get(timeout=30) == 3
    assert crossfade.get(other.echo.remote(4)) == 4
    crossfade.shutdown()  # then all that the actors have said is shown
    assert "holder of the key" in capfd.readouterr().err


def test_an_actor_that_writes_to_a_wrong_descriptor_is_killed_with_the_reason() -> None:
    victim, other = RemoteEcho.remote(), RemoteEcho.remote()
    graph = _echo_graph(other)
    with pytest.raises(crossfade.ActorDiedError, match=r"control connection is broken.*holder of the key.*killed"):
        crossfade.get(victim.write_to_sockets.remote(GARBAGE["noise"]))
    assert graph.execute(3).get(timeout=30) == 3


def test_an_actor_that_closes_its_control_socket_is_killed() -> None:
    victim = RemoteEcho.remote()
    with pytest.raises(crossfade.ActorDiedError):
        crossfade.get(victim.close_sockets.remote())


def test_what_an_actor_said_is_not_taken_twice_nor_sent_back() -> None:
    key = new_key()
    mine, theirs = socket.socketpair()
    end = Connection(theirs, key, "actor")
    head, tail = Sealer(key, "driver").seal(b"once")
    mine.send(head + b"once" + tail)
    message = end.take()
    assert message is not None
    assert message.payload == b"once"
    mine.send(head + b"once" + tail)
    with pytest.raises(FrameError, match="message 1"):
        end.take()
    with pytest.raises(FrameError):
        end.send(b"to nobody")
    end.close()
    mine.close()
    mine, theirs = socket.socketpair()
    end = Connection(theirs, key, "actor")
    end.send(b"reflected")
    mine.send(mine.recv(1000))
    with pytest.raises(FrameError, match="message 0"):
        end.take()
    end.close()
    mine.close()


def test_an_interrupted_send_neither_repeats_nor_skips_a_number() -> None:
    key = new_key()
    mine, other = Connection.pair(key)
    theirs = Connection(other, key, "actor")
    send_some = mine._send_some

    def interrupted(*args: Any) -> int:
        send_some(*args)
        raise KeyboardInterrupt

    with mock.patch.object(mine, "_send_some", interrupted), pytest.raises(KeyboardInterrupt):
        mine.send(b"went out whole")
    mine.send(b"next")
    first, second = theirs.take(), theirs.take()
    assert first is not None
    assert second is not None
    assert (first.payload, second.payload) == (b"went out whole", b"next")
    mine.close()
    theirs.close()


def test_a_key_is_read_once() -> None:
    key = new_key()
    fd = hand_over(key)
    again = os.dup(fd)
    assert take_over(fd, len(key)) == key
    with pytest.raises(ConnectionError):
        take_over(again, len(key))


def test_the_key_is_in_no_argument_and_no_environment() -> None:
    actor = RemoteEcho.remote()
    pid = crossfade.get(actor.pid.remote())
    engine: Any = sessions.require().engine
    (process,) = engine.processes.living.values()
    start = process.connection._sealer._start.digest()
    for name in ("cmdline", "environ"):
        with open(f"/proc/{pid}/{name}", "rb") as file:
            data = file.read()
        assert start not in data
        assert start.hex().encode() not in data
    inherited = [entry for entry in os.listdir(f"/proc/{pid}/fd") if int(entry) > 2]
    for entry in inherited:  # programs that the actor starts inherit none of them
        with open(f"/proc/{pid}/fdinfo/{entry}") as text:
            flags = next(int(line.split()[1], 8) for line in text if line.startswith("flags"))
        assert flags & os.O_CLOEXEC


def _mixed_graphs(actors: list[Any]) -> list[Any]:
    shm = actors[1].echo.bind(actors[0].echo.bind(crossfade.InputNode())).compile()
    with crossfade.InputNode() as value:
        made = actors[2].echo.bind(value).with_tensor_transport("gloo")
        gloo = actors[3].add.bind(made, made).compile()
    return [shm, gloo]


def test_nothing_listens_but_gloo_on_loopback() -> None:
    torch = pytest.importorskip("torch", reason="gloo needs torch")
    crossfade.shutdown()
    before = _bound_here()
    crossfade.init()
    actors = [RemoteEcho.remote() for _ in range(4)]
    pids = [crossfade.get(actor.pid.remote()) for actor in actors]
    assert bound_sockets(pids) == []
    assert _bound_here() == before
    shm, gloo = _mixed_graphs(actors)
    assert shm.execute(1).get(timeout=60) == 1
    assert gloo.execute(torch.ones(3)).get(timeout=60).sum() == 6
    bound = {*bound_sockets(pids), *_bound_here()} - before
    assert {each.address for each in bound} == {"127.0.0.1"}
    assert len(bound) == 2  # one for each party of gloo
    shm.teardown()
    gloo.teardown()
    assert _bound_here() <= before


def test_a_flood_at_gloos_ports_does_no_harm() -> None:
    torch = pytest.importorskip("torch", reason="gloo needs torch")
    actors = [RemoteEcho.remote() for _ in range(4)]
    pids = [crossfade.get(actor.pid.remote()) for actor in actors]
    _, gloo = _mixed_graphs(actors)
    ports = [each.port for each in bound_sockets(pids)]
    assert ports
    is_over = threading.Event()
    num_connections = [0]

    def flood() -> None:
        rng, open_sockets = random.Random(0), []
        while not is_over.is_set():
            for port in ports:
                with suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
                    sock.sendall((b"", struct.pack("<q", rng.randrange(8)), rng.randbytes(100))[rng.randrange(3)])
                    num_connections[0] += 1
                    open_sockets.append(sock)
            while len(open_sockets) > 100:
                open_sockets.pop(rng.randrange(100)).close()
        for sock in open_sockets:
            sock.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        while num_connections[0] < 1000:
            assert gloo.execute(torch.ones(1000)).get(timeout=60).sum() == 2000
        other = _mixed_graphs(actors)[1]  # opened meanwhile
        assert other.execute(torch.ones(1000)).get(timeout=60).sum() == 2000
    finally:
        is_over.set()
        flooding.join()


def _bound_here() -> set[Bound]:
    """What this process listens on; process groups of earlier tests may, as long as torch keeps them for compiled programs."""
    return set(bound_sockets([os.getpid()]))


def _join(monkeypatch: pytest.MonkeyPatch, between: Any, limit_s: float = 3.0) -> dict[str, BaseException | None]:
    """Two parties, the second of which comes after ``between(port of the first)``; what became of each."""
    gloo = pytest.importorskip("crossfade.channels.gloo", reason="gloo needs torch")
    monkeypatch.setattr("crossfade.channels.gloo_proof.TIME_LIMIT_S", limit_s)
    store = os.memfd_create("store")
    ends: dict[str, BaseException | None] = {}

    def join(party: str) -> None:
        bell = new_bell()
        try:
            gloo.GlooLink(Memory(os.dup(store)), ["a", "b"], party, bell).close()
            ends[party] = None
        except crossfade.ChannelError as error:
            ends[party] = error

    first, second = (threading.Thread(target=join, args=(party,)) for party in "ab")
    before = _bound_here()
    first.start()
    while not (bound := _bound_here() - before):
        first.join(0.01)
    between(bound.pop().port)
    second.start()
    for thread in (first, second):
        thread.join(60)
        assert not thread.is_alive()
    os.close(store)
    return ends


def test_whoever_takes_a_gloo_partys_place_without_the_key_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The impostor does not always come in time to be taken for the party: then the party itself is let in."""
    outcomes = set()
    for _ in range(10):
        with ExitStack() as stack:

            def take_the_place(port: int, stack: ExitStack = stack) -> None:
                for number in range(6):
                    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    sock.sendall(struct.pack("<q", number))

            ends = _join(monkeypatch, take_the_place)
        errors = [error for error in ends.values() if error is not None]
        assert len(errors) in (0, 2), ends
        assert all("did not prove" in str(error) for error in errors), ends
        outcomes.add(len(errors))
        if 2 in outcomes:
            break
    assert 2 in outcomes
    assert _join(monkeypatch, lambda port: None, limit_s=20.0) == {"a": None, "b": None}


def test_a_gloo_peer_with_another_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = pytest.importorskip("crossfade.channels.gloo_proof", reason="gloo needs torch")
    monkeypatch.setattr("crossfade.channels.gloo.shared_key", lambda store: proof.shared_key(store) and os.urandom(32))
    ends = _join(monkeypatch, lambda port: None)
    assert all(error is not None and "does not hold the group's key" in str(error) for error in ends.values()), ends


def test_answers_of_gloo_serve_for_one_pair_and_direction_only() -> None:
    proof = pytest.importorskip("crossfade.channels.gloo_proof", reason="gloo needs torch")
    one, two = b"1" * 32, b"2" * 32
    answers = {
        proof.answer(key, me, peer, theirs, mine)
        for key in (b"k" * 32, b"l" * 32)
        for me, peer in ((0, 1), (1, 0), (0, 2))
        for theirs, mine in ((one, two), (two, one))
    }
    assert len(answers) == 12
