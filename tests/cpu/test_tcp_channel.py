"""The channel between hosts, over loopback: the conformance suite, and what is its own."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.channels.protocol import EMPTY
from crossfade.channels.ring_layout import SLOT_BYTES
from crossfade.channels.tcp import TcpReader, TcpWriter
from crossfade.channels.wires import Wires, next_pause_ms
from crossfade.errors import ChannelBroken
from crossfade.host.frames import new_key
from crossfade.host.memory import Heap
from crossfade.host.tcp import Meeting, Stream, meet
from crossfade.testing import conformance
from tests.helpers.waiting import take, until
from tests.helpers.wires import new_bell, new_ring, new_wires, open_both_ways, open_tcp

TestTcp = conformance.suite(open_tcp)

_LIMIT_S = 20.0


def test_values_come_while_the_reader_does_not_look() -> None:
    """A thread takes them in: large ones leave the writer's memory though nobody reads."""
    with open_tcp(2, 1) as (writer, (reader,)):
        values = [np.full(4_000_000, number) for number in range(2)]
        assert all(writer.try_write(value) for value in values)
        until(writer.try_flush)
        for value in values:
            np.testing.assert_array_equal(take(reader), value)


class _AttendedWire:
    """What a `Wires` needs of a wire that has something to receive, and whose party looks at it again and again until it leaves."""

    fault = ""

    def __init__(self, undo: ExitStack, *, lands_for_others: bool = False) -> None:
        self.lands_for_others = lands_for_others
        self.is_attended, self.has_unsent = True, False
        self.was_pumped = threading.Event()
        self._num_received = 0
        self._socket, self.other = socket.socketpair()
        self._socket.setblocking(False)
        undo.callback(self.other.close)
        self.other.send(b"x")

    @property
    def num_received(self) -> int:
        self._num_received += 1000
        return self._num_received

    def fill(self) -> None:
        """There is nothing to receive, and what is to be sent has no room."""
        self._socket.recv(1)
        self.has_unsent = True
        with suppress(BlockingIOError):
            while True:
                self._socket.send(bytes(1 << 16))

    def fileno(self) -> int:
        return self._socket.fileno()

    def pump(self) -> bool:
        with suppress(BlockingIOError):
            self._socket.recv(1)
        self.has_unsent = False
        self.was_pumped.set()
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the threads of `Wires` leave connections to their party, in ms, as they come."""
    seen: list[float] = []

    class Poll:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register, self.unregister = self._poll.register, self._poll.unregister

        def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
            if timeout_ms is not None:
                seen.append(timeout_ms)
            return self._poll.poll(timeout_ms)

    names = {name: getattr(select, name) for name in ("POLLIN", "POLLOUT")}
    monkeypatch.setattr("crossfade.channels.wires.select", SimpleNamespace(poll=Poll, **names))
    return seen


def _open_wires(undo: ExitStack, *wires: _AttendedWire) -> None:
    opened: Any = wires
    undo.callback(Wires(new_bell(undo), opened).close)


def test_a_party_that_attends_is_seldom_disturbed_and_helped_once_it_leaves(pauses: list[float]) -> None:
    with ExitStack() as undo:
        wire = _AttendedWire(undo)
        _open_wires(undo, wire)
        until(lambda: len(pauses) >= 9)
        assert pauses[:9] == [1, 2, 4, 8, 16, 32, 64, 64, 64]
        wire.is_attended = False
        assert wire.was_pumped.wait(_LIMIT_S)


def test_others_on_the_host_wait_4_ms_at_most_whichever_wire_their_values_come_by(pauses: list[float]) -> None:
    with ExitStack() as undo:
        _open_wires(undo, _AttendedWire(undo), _AttendedWire(undo, lands_for_others=True))
        until(lambda: len(pauses) >= 5)
        assert pauses[:5] == [1, 2, 4, 4, 4]


def test_room_for_what_one_wire_has_left_ends_a_pause_for_another(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossfade.channels.wires.next_pause_ms", lambda *_: 1e3 * 5 * _LIMIT_S)
    with ExitStack() as undo:
        attended, other = _AttendedWire(undo), _AttendedWire(undo)
        other.fill()
        _open_wires(undo, attended, other)
        until(lambda: pauses)
        assert not other.was_pumped.is_set()
        other.other.setblocking(False)
        with suppress(BlockingIOError):
            while other.other.recv(1 << 20):
                pass
        assert other.was_pumped.wait(_LIMIT_S)


def test_a_value_that_cannot_be_taken_in_breaks_the_wire_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tcp(4, 1) as (writer, (reader,)):
        assert isinstance(reader, TcpReader)

        def refuse(heap: Heap, size_bytes: int) -> Any:
            raise MemoryError("no room")

        monkeypatch.setattr(Heap, "allocate", refuse)
        assert writer.try_write(bytes(5000))
        until(lambda: reader._wire.fault)
        with pytest.raises(ChannelBroken, match="could not be taken in: MemoryError: no room"):
            until(reader.try_read)


def test_a_party_that_seldom_receives_is_left_alone_for_a_millisecond_at_a_time() -> None:
    assert next_pause_ms(8, 7, 64) == 1
    assert next_pause_ms(8, 8, 64) == 16
    assert next_pause_ms(0, 1000, 64) == 1


def test_what_a_look_has_seen_is_received_by_the_next_read() -> None:
    with open_both_ways(4) as ((writer, _), (_, reader)):
        for number in range(50):
            until(partial(writer.try_write, number))
            until(lambda: not reader.is_idle())
            assert reader.try_read() == number
            assert reader.is_idle()


@pytest.mark.parametrize("size", [1, 100_000, 30_000_000])
def test_a_value_that_is_changed_after_it_was_written_arrives_as_it_was(size: int) -> None:
    """Also the part of it that the connection does not take at once."""
    with open_tcp(2, 1) as (writer, (reader,)):
        value = np.ones(size, np.uint8)
        assert writer.try_write(value)
        value[:] = 7
        got = take(reader)
        assert (got == 1).all()


def test_a_connection_that_is_lost_is_an_error_on_both_sides_after_what_had_arrived() -> None:
    with open_tcp(3, 2) as (writer, readers):
        assert writer.try_write("last")
        for reader in readers:
            assert take(reader) == "last"
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
                until(lambda: False, then=call)
            assert end.statistics().num_values == 1


def test_a_short_value_does_not_pass_the_ring_if_its_only_reader_asks_for_it() -> None:
    with open_tcp(4, 1) as (writer, (reader,)):
        assert isinstance(reader, TcpReader)
        for number in range(100):
            until(partial(writer.try_write, number))
            assert take(reader) == number
        assert reader.statistics().num_values == 100
        assert reader._landing.ring.num_values < 100  # the thread may have taken some in


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_tokens_come_back_with_values_of_every_kind_that_go_the_other_way(depth: int) -> None:
    with open_both_ways(depth) as ends:
        values: list[Any] = [b"x", 7, "text", np.arange(3), bytes(5000), np.arange(100_000)]
        for number in range(20 * depth):
            for (writer, _), (_, reader) in (ends, ends[::-1]):
                value = values[number % len(values)]
                until(partial(writer.try_write, value))
                got = take(reader)
                assert np.array_equal(got, value)
        for (writer, _), (_, reader) in (ends, ends[::-1]):
            assert reader._landing.num_read == 20 * depth
            assert reader._landing.num_due < max(2, depth)
            due = depth + reader._landing.num_returned

            def has_all(writer: TcpWriter = writer, due: int = due) -> bool:
                writer._wire.pump()
                return writer._num_given == due

            until(has_all)


def test_a_token_that_is_found_while_another_is_given_back_is_not_forgotten() -> None:
    with ExitStack() as undo:
        bell = new_bell(undo)
        ours, theirs = new_wires(bell)
        landing, rings = new_ring(undo, bell, 1, 2)
        theirs.add_landing(0, landing)
        writer, first = TcpWriter("n0", ours, 0, 1), TcpReader(rings[0], theirs, landing)
        for wire in (ours, theirs):
            undo.callback(wire.close)
        for ring in rings:
            undo.callback(ring.close)
        assert writer.try_write(b"x")
        assert take(first) == b"x"
        theirs.pump()  # the other reader has not read it
        assert rings[1].try_read() == b"x"
        theirs.give_back(landing)
        until(writer.has_room)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["short", "long", "look", "read", "pump"]), max_size=60))
def test_values_are_read_in_their_order_whoever_takes_them_in(steps: list[str]) -> None:
    """Short ones that the reader asked for, those that others took into the ring, and long ones, which land there in parts."""
    with open_tcp(4, 1) as (writer, (reader,)):
        assert isinstance(reader, TcpReader)
        written = 0
        read: list[Any] = []
        for step in steps:
            if step in ("short", "long"):
                written += writer.try_write((written, bytes(300_000 if step == "long" else 3)))
            elif step == "look":
                reader.is_idle()
            elif step == "pump":
                reader._wire.pump()
            elif (value := reader.try_read()) is not EMPTY:
                read.append(value)
        while len(read) < written:
            read.append(take(reader))
        assert [number for number, _ in read] == list(range(written))
        assert reader.try_read() is EMPTY


def test_a_value_that_begins_to_come_while_another_landing_is_freed_comes_whole() -> None:
    """As where a thread is let in there: a compiled closure that is being freed is not yet the next one's."""
    with ExitStack() as undo:
        bell = new_bell(undo)
        (freed, _), (landing, _) = new_ring(undo, bell, 2, 1), new_ring(undo, bell, 2, 1)
        begun: list[Callable[[], None]] = []

        class Last:
            """The last thing that the freed landing lets go of."""

            def __call__(self) -> bool:
                return True

            def __del__(self) -> None:
                begun.append(landing.begin(SLOT_BYTES, 70_000)[1])

        freed.is_empty = Last()
        _, finish = freed.begin(SLOT_BYTES, 50_000)
        del freed, finish
        begun.pop()()
        assert landing.ring.num_values == 1


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
            assert len(take(reader)) == size
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
        until(lambda: come)
        assert come == ["friend"]
