"""Counters that streams write and wait for.

A *signal* is a 32-bit word that is 0 or 1. The party that brings something about sets it to 1 on its stream; the one that needs it
waits for 1 and puts it back to 0 in the same breath. A constant that resets itself, and not a number that counts up, because a
captured graph repeats the very values that it was captured with.

A signal is waited for by one stream, or by streams that are ordered behind each other: of two waits on two streams, the second
could take the value that the first is about to put back.

A signal in *steps* says more than one thing before it is put back: its writer sets it to 1, 2, ..., and only the wait for the last
step clears it. A wait is for its step or a later one, so it does not matter how far the writer is.

Why nothing is lost: a set and a wait alternate. The next set comes only after the reset, because the side that sets waits for an
answer (another signal) that the waiting side gives behind its reset.

A *counter* is a word that only grows. It needs no reset, so a wait costs one operation and not two, any stream may wait for it,
and a host that sees it high enough need not enqueue the wait at all; but it cannot be captured.

Both lie in pinned shared host memory, where the host reads and releases them with plain loads and stores, with no stream in
between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from crossfade.device.driver import Driver, HostRange
from crossfade.host.memory import Memory

CLEAR, SET = 0, 1
_MASK, _HALF = 0xFFFF_FFFF, 0x8000_0000

WORD_BYTES = 64  # distance from one signal to the next: signals of different writers share no cache line


class Signal:
    """One signal, as this process's device sees it."""

    __slots__ = ("_board", "_driver", "_index", "_wait_and_reset", "_write", "address", "label", "last")

    def __init__(self, driver: Driver, board: SignalBoard, index: int, address: int, label: str) -> None:
        self._driver = driver
        self._board = board
        self._index = index
        self._write = driver.write_value
        self._wait_and_reset = driver.wait_and_reset
        self.address = address
        self.label = label
        self.last = SET  # the highest step that this process waited for
        driver.name_range(address, 4, label)

    def set(self, stream: int, step: int = SET) -> None:
        """Enqueues: say that all before this on the stream is done."""
        self._write(stream, self.address, step)

    def wait(self, stream: int) -> None:
        """Enqueues: hold the stream until the signal is set, then clear it. Its setting must have been enqueued before (PL-5)."""
        self._wait_and_reset(stream, self.address, SET, CLEAR)

    def expect(self, step: int) -> None:
        """A release after a peer's death ends waits for this step, too."""
        self.last = max(self.last, step)

    def wait_for_step(self, stream: int, step: int) -> None:
        """Enqueues: hold the stream until this step or a later one is set. It stays set."""
        self.expect(step)
        self._driver.wait_value(stream, self.address, step)

    def is_set(self) -> bool:
        """Whether it is set now, and nobody can wait for a later step; read by the host."""
        return self._board.peek(self._index) >= self.last

    def is_missed(self, was_released: bool) -> bool:
        """Whether a stream is known to wait for it: one that was released and is clear again was taken."""
        return was_released and not self.is_set()

    def release(self) -> None:
        """Sets it from the host, past all streams: releases the streams that wait for a peer that is dead."""
        self._board.poke(self._index, self.last)


class Counter:
    """One counter, as this process's device sees it."""

    __slots__ = ("_board", "_driver", "_index", "_peek", "address", "awaited", "label")

    def __init__(self, driver: Driver, board: SignalBoard, index: int, address: int, label: str) -> None:
        self._driver = driver
        self._board = board
        self._index = index
        self._peek = board.peeker(index)
        self.address = address
        self.label = label
        self.awaited = 0  # the highest value that this process waited for
        driver.name_range(address, 4, label)

    def set(self, stream: int, value: int) -> None:
        """Enqueues: say that so many are done."""
        self._driver.write_value(stream, self.address, value & _MASK)

    def set_from_host(self, value: int) -> None:
        """Says that so many are done, from the host: no stream has anything to do with it."""
        self._board.poke(self._index, value & _MASK)

    def reset(self) -> None:
        """Begins at 0 again, from the host, while no stream uses the counter."""
        self.awaited = 0
        self._board.poke(self._index, 0)

    def wait(self, stream: int, value: int) -> None:
        """Enqueues: hold the stream until so many are done. Its setting has been enqueued before (PL-5, with its exception)."""
        self.awaited = value
        self._driver.wait_value(stream, self.address, value & _MASK)

    def has(self, value: int) -> bool:
        """Whether so many are done."""
        return (self._peek() - value) & _MASK < _HALF

    def is_set(self) -> bool:
        """Whether nothing waits for it."""
        return self.has(self.awaited)

    def is_missed(self, was_released: bool) -> bool:
        """Whether a stream is known to wait for it."""
        return not self.is_set()

    def release(self) -> None:
        """Sets it from the host, past all streams, to what was waited for."""
        self._board.poke(self._index, self.awaited & _MASK)


class Releasable(Protocol):
    """What a watchdog needs of a signal or a counter."""

    label: str

    def is_set(self) -> bool:
        """Whether there is nothing to release."""

    def is_missed(self, was_released: bool) -> bool:
        """Whether a stream is known to wait for it."""

    def release(self) -> None:
        """Releases the streams that wait for it."""


class SignalBoard:
    """A row of signals in a range of pinned host memory that two processes share, from ``offset`` in it on."""

    def __init__(self, driver: Driver, shared: HostRange, num_signals: int, offset: int = 0) -> None:
        self.num_signals = num_signals
        self._driver = driver
        self._shared = shared
        self._offset = offset

    def _place(self, index: int) -> int:
        return self._offset + index * WORD_BYTES

    def signal(self, index: int, label: str) -> Signal:
        """The signal in this place."""
        return Signal(self._driver, self, index, self._shared.address + self._place(index), label)

    def counter(self, index: int, label: str) -> Counter:
        """The counter in this place; it begins at 0."""
        return Counter(self._driver, self, index, self._shared.address + self._place(index), label)

    def peek(self, index: int) -> int:
        """Its word, read by the host."""
        return self.peeker(index)()

    def peeker(self, index: int) -> Callable[[], int]:
        """`peek` of one signal, for callers that do it often."""
        return self._shared.peeker(self._place(index))

    def poke(self, index: int, value: int) -> None:
        """Stores its word from the host."""
        self._shared.poke(self._place(index), value)

    def part(self, first: int, num_signals: int) -> SignalBoard:
        """``num_signals`` of the row, from ``first``, as a board of their own."""
        if not 0 <= first <= first + num_signals <= self.num_signals:
            raise ValueError(f"signals {first} to {first + num_signals} of a row of {self.num_signals}")
        return SignalBoard(self._driver, self._shared, num_signals, self._place(first))

    def close(self) -> None:
        """Nothing: the owner of the whole row gives it back."""


class HostBoard(SignalBoard):
    """A row of signals in pinned shared host memory, which is zeroed, and shared by both sides. It takes ``num_signals *
    WORD_BYTES`` bytes from ``offset``, a multiple of the page size.
    """

    def __init__(self, driver: Driver, memory: Memory, num_signals: int, label: str, offset: int = 0) -> None:
        shared = driver.map_host(memory, offset, num_signals * WORD_BYTES, f"signals of {label}")
        super().__init__(driver, shared, num_signals)

    def close(self) -> None:
        """No operation on the signals may be pending. Idempotent."""
        self._shared.close()
