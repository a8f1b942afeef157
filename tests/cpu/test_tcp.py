"""Connections between hosts, here over loopback: who may connect, what arrives, how they end."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier
from typing import Any

import pytest

from crossfade.errors import DeviceError
from crossfade.host.tcp import Stream, open_streams, own_address

_LIMIT_S = 20.0


class Ranks:
    """Threads that tell each other numbers; ``on_gathered`` is called once, when all have."""

    def __init__(self, num: int, on_gathered: Callable[[list[list[int]]], object] = len) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num)]

        def gathered() -> None:
            on_gathered(self.rows)

        self._barrier = Barrier(num, gathered)

    def gather(self, rank: int) -> Callable[[list[int]], list[list[int]]]:
        def call(own: list[int]) -> list[list[int]]:
            self.rows[rank] = own
            self._barrier.wait(_LIMIT_S)
            return self.rows

        return call


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def _open_all(pool: ThreadPoolExecutor, num: int, ranks: Ranks, timeout_s: float = _LIMIT_S) -> list[dict[int, Stream]]:
    opened = [
        pool.submit(open_streams, k, [peer for peer in range(num) if peer != k], ranks.gather(k), timeout_s)
        for k in range(num)
    ]
    return [each.result(_LIMIT_S) for each in opened]


def _close(all_streams: list[dict[int, Stream]]) -> None:
    for streams in all_streams:
        for stream in streams.values():
            stream.end()
            stream.close()
            stream.close()


def test_messages_and_plain_bytes_between_four(pool: ThreadPoolExecutor) -> None:
    gc.collect()  # what tests before have left would go meanwhile
    num_before = len(os.listdir("/proc/self/fd"))
    streams = _open_all(pool, 4, Ranks(4))
    for k, row in enumerate(streams):
        assert sorted(row) == [peer for peer in range(4) if peer != k]
        for peer, stream in row.items():
            stream.send(f"{k} to {peer}".encode())
    for k, row in enumerate(streams):
        for peer, stream in row.items():
            assert stream.receive() == f"{peer} to {k}".encode()
    value, target = os.urandom(5_000_000), bytearray(5_000_000)
    sent = pool.submit(streams[1][3].send_plain, memoryview(value))
    streams[3][1].receive_plain(memoryview(target))
    sent.result(_LIMIT_S)
    assert target == value
    _close(streams)
    assert len(os.listdir("/proc/self/fd")) <= num_before


def test_whoever_lacks_the_key_is_turned_away(pool: ThreadPoolExecutor) -> None:
    """Noise, silence, a wrong key and a rank that is not waited for come first, and do not disturb."""
    strangers: list[socket.socket] = []

    def intrude(rows: list[list[int]]) -> None:
        place = (own_address(), rows[0][1])
        for noise in (b"", b"\x00\x00\x00\x05hello", b"\xff" * 100):
            stranger = socket.create_connection(place)
            stranger.sendall(noise)
            stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        strangers.append(socket.create_connection(place))
        pool.submit(_prove_wrongly, strangers[-1])

    streams = _open_all(pool, 2, Ranks(2, intrude))
    streams[1][0].send(b"still there")
    assert streams[0][1].receive() == b"still there"
    for stranger in strangers[:3]:
        stranger.settimeout(_LIMIT_S)
        with suppress(ConnectionResetError):
            while stranger.recv(1000):  # the challenge, and then the end
                pass
        stranger.close()
    _close(streams)


def _prove_wrongly(connected: socket.socket) -> None:
    stream = Stream(connected)
    with pytest.raises(Exception, match="digest"):
        stream.prove(b"another key", is_first=False, limit_s=_LIMIT_S)
    stream.close()


def test_a_rank_that_does_not_come(pool: ThreadPoolExecutor) -> None:
    """The one that listens says whom it has waited for; nothing of it stays."""
    num_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError, match=r"no connection with rank 1, rank 2 could be opened: .*\nhint: set GLOO_SOC"):
        open_streams(0, [1, 2], lambda own: [own] * 3, 0.3)
    assert len(os.listdir("/proc/self/fd")) == num_before


def test_a_rank_that_is_gone_when_it_is_called(pool: ThreadPoolExecutor) -> None:
    with socket.create_server((own_address(), 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(DeviceError, match="no connection with rank 0 could be opened: "):
        open_streams(1, [0], lambda own: [[own[0], port, *own[2:]], own], 2.0)


def test_the_end_of_one_side_ends_calls_of_both(pool: ThreadPoolExecutor) -> None:
    (first, second) = _open_all(pool, 2, Ranks(2))
    waiting: list[Future[Any]] = [
        pool.submit(first[1].receive),
        pool.submit(second[0].receive_plain, memoryview(bytearray(10))),
    ]
    first[1].end()
    errors = [each.exception(_LIMIT_S) for each in waiting]
    assert all(isinstance(error, EOFError | OSError) for error in errors)
    _close([first, second])


def test_no_peers_no_connection() -> None:
    assert open_streams(0, [], lambda own: [own], 1.0) == {}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"GLOO_SOCKET_IFNAME": "lo"}, "127.0.0.1"), ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1")],
)
def test_the_address(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_address() == expected


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(
        DeviceError, match=r"no connection with rank 1 could be opened: .*\nhint: set GLOO_SOCKET_IFNAME"
    ):
        open_streams(0, [1], lambda own: [own, own], 1.0)
