"""What every transport must do, as one suite of tests that each passes in one line.

::

    TestShm = conformance.suite(open_shm_pair)

The argument opens a channel with both sides in this process: ``open_pair(depth, num_readers) -> (writer, readers)``, a context
manager that closes both. Nothing here needs pytest; it finds the methods by their names.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from crossfade.channels.protocol import EMPTY, Reader, Writer
from crossfade.errors import ChannelBroken, ChannelClosed, Failure

OpenPair = Callable[[int, int], AbstractContextManager[tuple[Writer, Sequence[Reader]]]]

_TIME_LIMIT_S = 30.0


def _until(attempt: Callable[[], Any], done: Callable[[Any], bool]) -> Any:
    """Repeats an attempt until it is done: transports that work in the background take their time."""
    deadline = time.monotonic() + _TIME_LIMIT_S
    while not done(result := attempt()):
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing came of {attempt} within {_TIME_LIMIT_S} s")
        time.sleep(0)  # lets the transport's threads have the interpreter
    return result


def _write(writer: Writer, value: object) -> None:
    _until(lambda: writer.try_write(value), bool)


def _start(reader: Reader) -> None:
    _until(reader.try_start, bool)


def _take(reader: Reader) -> Any:
    return _until(reader.try_read, lambda value: value is not EMPTY)


def _read(reader: Reader) -> Any:
    """Starts, reads and releases one value."""
    _start(reader)
    value = _take(reader)
    reader.release()
    return value


class _Unpicklable:
    """Pickles, but does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("this is no number",)


class ChannelSuite:
    """The tests. Made a class of its own for each transport by `suite`."""

    open_pair: OpenPair

    def test_ch1_values_arrive_whole_and_in_order(self) -> None:
        """Values of many kinds and sizes."""
        values = [0, None, b"", b"x" * 5000, "text", 3.5, [1, {"k": (2, None)}], {"a": b"y" * 2000}, list(range(3000))]
        with self.open_pair(2, 1) as (writer, (reader,)):
            for value in values:
                _write(writer, value)
                assert _read(reader) == value

    def test_ch1_every_reader_reads_every_value_once(self) -> None:
        """Several readers."""
        with self.open_pair(3, 3) as (writer, readers):
            for number in range(50):
                _write(writer, number)
                assert [_read(reader) for reader in readers] == [number] * 3
            assert all(reader.try_read() is EMPTY for reader in readers)

    def test_arrays_of_all_sizes(self) -> None:
        """Small and large ones, growing and shrinking."""
        random = np.random.default_rng(0)
        with self.open_pair(2, 2) as (writer, readers):
            for size in (0, 1, 100, 128, 1000, 100_000, 1_000_000, 50, 2_000_000):
                array = random.integers(0, 255, size, dtype=np.uint8)
                _write(writer, {"array": array, "size": size})
                for reader in readers:
                    value = _read(reader)
                    assert value["size"] == size
                    np.testing.assert_array_equal(value["array"], array)

    def test_arrays_cannot_be_written(self) -> None:
        """Values are immutable once they are sent."""
        with self.open_pair(2, 1) as (writer, (reader,)):
            for size in (10, 100_000):
                _write(writer, np.zeros(size))
                assert not _read(reader).flags.writeable

    def test_a_full_ring_accepts_nothing_and_loses_nothing(self) -> None:
        """The ring has exactly `depth` slots."""
        for depth in (1, 2, 5):
            with self.open_pair(depth, 1) as (writer, (reader,)):
                for number in range(depth):
                    assert writer.try_write(number)
                assert not writer.try_write("too many")
                assert [_read(reader) for _ in range(depth)] == list(range(depth))
                _write(writer, "again")
                assert _read(reader) == "again"

    def test_ch1_kept_values_stay_whole_and_never_stop_the_ring(self) -> None:
        """Readers keep everything that they read."""
        with self.open_pair(2, 2) as (writer, readers):
            kept: list[list[Any]] = [[] for _ in readers]
            for number in range(20):
                _write(writer, np.full(50_000, number))
                for reader, mine in zip(readers, kept, strict=True):
                    mine.append(_read(reader))
            assert all((array == number).all() for mine in kept for number, array in enumerate(mine))
            kept.clear()
            mine = []
            gc.collect()
            assert all(reader.statistics().num_kept == 0 for reader in readers)

    def test_values_outlive_their_channel(self) -> None:
        """A value is read, then the channel is closed."""
        with self.open_pair(2, 1) as (writer, (reader,)):
            _write(writer, np.arange(100_000))
            array = _read(reader)
        gc.collect()
        np.testing.assert_array_equal(array, np.arange(100_000))

    def test_an_unpicklable_value_is_refused_and_nothing_is_written(self) -> None:
        """The next value is the next that is read."""
        with self.open_pair(2, 1) as (writer, (reader,)):
            try:
                writer.try_write(number for number in range(0))
            except TypeError:
                pass
            else:
                raise AssertionError("a generator was accepted")
            _write(writer, "next")
            assert _read(reader) == "next"

    def test_a_value_that_does_not_unpickle_arrives_as_a_failure(self) -> None:
        """The reader gets the error in its place."""
        with self.open_pair(2, 1) as (writer, (reader,)):
            _write(writer, _Unpicklable())
            assert type(_read(reader)) is Failure
            _write(writer, "next")
            assert _read(reader) == "next"

    def test_failures_travel(self) -> None:
        """An error is a value like any other."""
        for size in (1, 100_000):
            failure = Failure.capture(ValueError("x" * size), actor="a", node="n")
            with self.open_pair(2, 1) as (writer, (reader,)):
                _write(writer, failure)
                assert _read(reader) == failure

    def test_ch2_closed_by_me(self) -> None:
        """Closed by this side."""
        with self.open_pair(2, 1) as (writer, (reader,)):
            writer.close()
            writer.close()
            _raises(ChannelClosed, lambda: writer.try_write(1))
            reader.close()
            _raises(ChannelClosed, reader.try_read)

    def test_ch2_broken_by_the_writer(self) -> None:
        """Nothing more will come."""
        with self.open_pair(2, 1) as (writer, (reader,)):
            _write(writer, "last")
            _start(reader)
            _until(lambda: (writer.try_flush(), reader.statistics())[0], bool)
            value = _take(reader)
            reader.break_off("the writer died")
            assert value == "last"
            _raises(ChannelBroken, reader.try_read)

    def test_ch3_what_had_arrived_can_be_read_after_the_end(self) -> None:
        """The end comes after the values."""
        with self.open_pair(2, 1) as (writer, (reader,)):
            _write(writer, "last")
            _start(reader)
            _until(writer.try_flush, bool)
            _until(lambda: _has_arrived(reader), bool)
            reader.break_off("the writer died")
            assert _take(reader) == "last"
            _raises(ChannelBroken, reader.try_read)

    def test_ch2_broken_by_the_reader(self) -> None:
        """Nobody will read it."""
        with self.open_pair(2, 1) as (writer, (_,)):
            writer.break_off("the reader died")
            _raises(ChannelBroken, lambda: writer.try_write(1))


def _has_arrived(reader: Reader) -> bool:
    """Whether a started value is there. Only transports with a background have an inbox to look into."""
    inbox = getattr(reader, "inbox", None)
    return inbox is None or len(inbox) > 0


def _raises(error: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{call} did not raise {error.__name__}")


def suite(open_pair: OpenPair) -> type[ChannelSuite]:
    """The suite for one transport."""
    return type("TestChannel", (ChannelSuite,), {"open_pair": staticmethod(open_pair)})
