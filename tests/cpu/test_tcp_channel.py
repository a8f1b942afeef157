"""The channel between hosts, over loopback: the conformance suite, and what is its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from crossfade.channels.protocol import EMPTY
from crossfade.channels.tcp import TcpWriter
from crossfade.channels.wires import Wires, longer_patience_ms
from crossfade.errors import ChannelBroken
from crossfade.host.frames import new_key
from crossfade.host.tcp import Meeting, Stream, meet
from crossfade.testing import conformance
from tests.helpers.wires import new_bell, open_tcp

TestTcp = conformance.suite(open_tcp)

_LIMIT_S = 20.0


def _until(attempt: Callable[[], Any], done: Callable[[Any], bool] = bool) -> Any:
    deadline = time.monotonic() + _LIMIT_S
    while not done(result := attempt()):
        assert time.monotonic() < deadline
        time.sleep(0)
    return result


def test_values_come_while_the_reader_does_not_look() -> None:
    """A thread takes them in: large ones leave the writer's memory though nobody reads."""
    with open_tcp(2, 1) as (writer, (reader,)):
        values = [np.full(4_000_000, number) for number in range(2)]
        assert all(writer.try_write(value) for value in values)
        _until(writer.try_flush)
        for value in values:
            np.testing.assert_array_equal(_until(reader.try_read, lambda read: read is not EMPTY), value)


class _AttendedWire:
    """What a `Wires` needs of a wire whose party looks at it again and again, until ``is_left``."""

    fault, has_unsent = "", False

    def __init__(self, *, lands_for_others: bool) -> None:
        self.lands_for_others = lands_for_others
        self.num_seen = 0
        self.is_left = threading.Event()
        self.was_pumped = threading.Event()
        self._socket, other = socket.socketpair()
        other.send(b"something that the thread sees")
        self._other = other

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_attended(self) -> bool:
        self.num_seen += 1
        return not self.is_left.is_set()

    def pump(self) -> bool:
        self._socket.recv(100)
        self.was_pumped.set()
        return True

    def close(self) -> None:
        self._socket.close()
        self._other.close()


@pytest.mark.parametrize("lands_for_others", [False, True])
def test_a_party_that_attends_is_seldom_disturbed_and_helped_once_it_leaves(lands_for_others: bool) -> None:
    with ExitStack() as undo:
        wire: Any = _AttendedWire(lands_for_others=lands_for_others)
        wires = Wires(new_bell(undo), [wire])
        undo.callback(wires.close)
        begin_s = time.monotonic()
        num_looks = 10 if lands_for_others else 6  # 1 + 2 + 4 + 8 + 16 ms, then 32
        _until(lambda: wire.num_seen >= num_looks)
        assert time.monotonic() - begin_s >= (0.030 if lands_for_others else 0.029)
        wire.is_left.set()
        assert wire.was_pumped.wait(_LIMIT_S)


def test_how_long_a_connection_is_left_to_its_party() -> None:
    for are_for_others, limit_ms in ((False, 64), (True, 4)):
        patience_ms = [1]
        while len(patience_ms) < 10:
            patience_ms.append(longer_patience_ms(patience_ms[-1], are_for_others=are_for_others))
        assert patience_ms[:3] == [1, 2, 4]
        assert patience_ms[-1] == limit_ms


@pytest.mark.parametrize("size", [1, 100_000, 30_000_000])
def test_a_value_that_is_changed_after_it_was_written_arrives_as_it_was(size: int) -> None:
    """Also the part of it that the connection does not take at once."""
    with open_tcp(2, 1) as (writer, (reader,)):
        value = np.ones(size, np.uint8)
        assert writer.try_write(value)
        value[:] = 7
        got = _until(reader.try_read, lambda read: read is not EMPTY)
        assert (got == 1).all()


def test_a_connection_that_is_lost_is_an_error_on_both_sides_after_what_had_arrived() -> None:
    with open_tcp(3, 2) as (writer, readers):
        assert writer.try_write("last")
        for reader in readers:
            assert _until(reader.try_read, lambda read: read is not EMPTY) == "last"
        assert isinstance(writer, TcpWriter)
        assert writer._wire._stream is not None
        writer._wire._stream.end()
        for end, call in (
            (readers[0], readers[0].try_read),
            (readers[1], readers[1].try_read),
            (writer, writer.has_room),
        ):
            with pytest.raises(
                ChannelBroken, match=r"n0 is broken: (the connection to peer on there is lost|the other)"
            ):
                _until(call, lambda _: False)
            assert end.statistics().num_values == 1


def test_two_threads_write_and_read_a_stream_of_mixed_sizes() -> None:
    with open_tcp(4, 1) as (writer, (reader,)):
        sizes = [1, 30_000, 5, 900, 1100, 500_000] * 40

        def write_all() -> None:
            for size in sizes:
                value = bytes(size)
                while not writer.try_write(value):
                    time.sleep(0)

        thread = threading.Thread(target=write_all)
        thread.start()
        for size in sizes:
            assert len(_until(reader.try_read, lambda read: read is not EMPTY)) == size
        thread.join()


def test_who_does_not_have_the_key_is_not_let_in() -> None:
    come: list[str] = []

    def on_come(name: str, stream: Stream) -> bool:
        come.append(name)
        undo.callback(stream.close)
        return True

    with ExitStack() as undo:
        key = new_key()
        meeting = Meeting("127.0.0.1", key, on_come)
        undo.callback(meeting.close)
        with pytest.raises((OSError, EOFError)):
            meet("127.0.0.1", meeting.port, new_key(), "stranger", 5.0)
        with socket.create_connection(("127.0.0.1", meeting.port)) as silent:
            silent.sendall(b"x" * 10)
        friend = meet("127.0.0.1", meeting.port, key, "friend", 10.0)
        undo.callback(friend.close)
        _until(lambda: come)
        assert come == ["friend"]
