"""Counters that streams write and wait for.

A *signal* is a 32-bit word that is 0 or 1. Who brings something about sets it to 1 on its stream; who needs it waits for 1 and
puts it back to 0 in the same breath. A constant that resets itself, and not a number that counts up, because a captured graph
repeats the very values that it was captured with.

A signal is waited for by one stream, or by streams that are ordered behind each other: of two waits on two streams, the second
could take the value that the first is about to put back.

Why nothing is lost: a set and a wait alternate. The next set comes only after the reset, because the side that sets waits for an
answer (another signal) that the waiting side gives behind its reset.

Signals lie in pinned shared host memory (`HostBoard`) or in exported device memory (`DeviceBoard`). On a host board the host
reads and releases signals with plain loads and stores, with no stream in between; a device board is nearer to the waiting GPU.
"""

from __future__ import annotations

from typing import Protocol

from crossfade.device.driver import Driver, HostRange
from crossfade.host.memory import Memory

__all__ = ["CLEAR", "SET", "WORD_BYTES", "DeviceBoard", "HostBoard", "Signal", "SignalBoard"]

CLEAR, SET = 0, 1

WORD_BYTES = 64
"""Distance from one signal to the next: signals of different writers share no cache line."""


class Signal:
    """One signal, as this process's device sees it.

    Attributes:
        label: what it says when it is set.
        address: where it lies.
        num_waits: waits that this process has enqueued; for the watchdog's report.
    """

    __slots__ = ("_board", "_driver", "_index", "_wait_and_reset", "_write", "address", "label", "num_waits")

    def __init__(self, driver: Driver, board: SignalBoard, index: int, address: int, label: str) -> None:
        self._driver = driver
        self._board = board
        self._index = index
        self._write = driver.write_value
        self._wait_and_reset = driver.wait_and_reset
        self.address = address
        self.label = label
        self.num_waits = 0
        driver.name_range(address, 4, label)

    def set(self, stream: int) -> None:
        """Enqueues: say that all before this on the stream is done."""
        self._write(stream, self.address, SET)

    def wait(self, stream: int) -> None:
        """Enqueues: hold the stream until the signal is set, then clear it. Its setting must have been enqueued before (PL-5)."""
        self.num_waits += 1
        self._wait_and_reset(stream, self.address, SET, CLEAR)

    def is_set(self) -> bool:
        """How it is now, read by the host."""
        return self._board.peek(self._index) == SET

    def release(self) -> None:
        """Sets it from the host, past all streams: lets go whoever waits for a peer that is dead."""
        self._board.poke(self._index, SET)

    def preset(self, value: int) -> None:
        """Stores a first value from the host, while no stream uses the signal."""
        self._board.poke(self._index, value)


class SignalBoard(Protocol):
    """A row of signals that two processes share."""

    num_signals: int

    def signal(self, index: int, label: str) -> Signal:
        """The signal in this place."""

    def peek(self, index: int) -> int:
        """Its word, read by the host."""

    def poke(self, index: int, value: int) -> None:
        """Stores its word from the host."""

    def close(self) -> None:
        """No operation on the signals may be pending. Idempotent."""


class HostBoard:
    """Signals in pinned shared host memory.

    Args:
        driver: this process's device.
        memory: shared by both sides, zeroed, with room for ``num_signals * WORD_BYTES`` bytes at ``offset``.
        num_signals: length of the row.
        label: for reports.
        offset: a multiple of the page size.
    """

    def __init__(self, driver: Driver, memory: Memory, num_signals: int, label: str, offset: int = 0) -> None:
        self.num_signals = num_signals
        self._driver = driver
        self._range: HostRange = driver.map_host(memory, offset, num_signals * WORD_BYTES, f"signals of {label}")

    def signal(self, index: int, label: str) -> Signal:
        """See `SignalBoard`."""
        return Signal(self._driver, self, index, self._range.address + index * WORD_BYTES, label)

    def peek(self, index: int) -> int:
        """See `SignalBoard`."""
        return self._range.peek(index * WORD_BYTES)

    def poke(self, index: int, value: int) -> None:
        """See `SignalBoard`."""
        self._range.poke(index * WORD_BYTES, value)

    def close(self) -> None:
        """See `SignalBoard`."""
        self._range.close()


class DeviceBoard:
    """Signals in device memory: this process's own, or opened.

    Args:
        driver: this process's device.
        address: where the row begins; whoever owns the memory frees it.
        num_signals: length of the row.
    """

    def __init__(self, driver: Driver, address: int, num_signals: int) -> None:
        self.num_signals = num_signals
        self._driver = driver
        self._address = address

    def signal(self, index: int, label: str) -> Signal:
        """See `SignalBoard`."""
        return Signal(self._driver, self, index, self._address + index * WORD_BYTES, label)

    def peek(self, index: int) -> int:
        """See `SignalBoard`."""
        return self._driver.peek(self._address + index * WORD_BYTES)

    def poke(self, index: int, value: int) -> None:
        """See `SignalBoard`."""
        self._driver.poke(self._address + index * WORD_BYTES, value)

    def close(self) -> None:
        """Nothing: the memory's owner frees it."""
