"""What a measure works with: one device, memory to move, signals, the gate; and how the ranks meet.

A *measure* is a generator that runs on every rank of its step. ``told = yield value`` is a meeting: it continues when all ranks are
there, and ``told`` has what each of them said, by rank. Meetings are numbered.

The *gate* is a counter in memory that all devices see, and its count is the number of the last meeting. What a rank enqueues
behind ``gate.wait(stream, n)`` therefore begins on all devices at once, when the ranks have met n times. PL-5 would forbid a wait
that needs a host. It is safe here, since what opens the gate is a plain store by another process that enqueues nothing; every
kernel has been loaded by a round with an open gate; and who started the processes ends them when a step takes too long.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from crossfade.device.memory import OpenedMemory, Pool
from crossfade.device.signals import WORD_BYTES, Counter, HostBoard
from crossfade.device.staged import StagedLayout, StagedReceiver, StagedSender
from crossfade.host.memory import Memory
from crossfade.profile.bench import Bench
from crossfade.profile.steps import Step

BUFFER_BYTES = 256 << 20
"""The longest transfer."""
STAGED_LAYOUT = StagedLayout(num_chunks=44, chunk_bytes=3 << 20)
"""Two values of 64 MB fit, so nobody waits for a host in mid-value."""

Told: TypeAlias = Mapping[int, Any]
Meeting: TypeAlias = Generator[Any, Told, None]
Measure: TypeAlias = Callable[["Context", Step], Generator[Any, Told, Any]]


def _num_signals(num_ranks: int) -> int:
    return 1 + num_ranks * num_ranks


def make_shared(num_ranks: int) -> list[Memory]:
    """The memory that the ranks share: of signals, then the staging of each rank. Pages are taken when they are used."""
    signals = Memory.create("calibration", _num_signals(num_ranks) * WORD_BYTES)
    return [signals, *(Memory.create("staging", STAGED_LAYOUT.size_bytes) for _ in range(num_ranks))]


class Context:
    """One rank."""

    def __init__(self, bench: Bench, rank: int, num_ranks: int, shared: Sequence[Memory]) -> None:
        self.bench = bench
        self.driver = bench.driver
        self.rank = rank
        self.num_ranks = num_ranks
        self.shared = shared
        self.stagings = shared[1:]  # memory for the staged values of each rank
        self.num_meetings = 0  # how often the ranks of this and earlier steps have met
        # ends of the staged transfers of one step; see ``carriers.py``.
        self.staged_ends: list[StagedSender | StagedReceiver] = []
        self._board = HostBoard(self.driver, shared[0], _num_signals(num_ranks), "calibration")
        self._gate = self._board.counter(0, "gate")
        self._counters: dict[tuple[int, int], Counter] = {}
        self._pool = Pool(self.driver)
        self._buffers: dict[str, Any] = {}
        self._opened: dict[str, OpenedMemory] = {}
        self._streams: dict[str, int] = {}

    def lane(self, number: int) -> int:
        """A stream for what moves. Few, and the same ones for all measures: streams that share a hardware queue hold each other."""
        return self.stream(f"lane {number}")

    def stream(self, label: str) -> int:
        """A stream, made once; what moves goes ahead of what computes."""
        if label not in self._streams:
            self._streams[label] = self.driver.create_stream(label, is_urgent=label != "work")
        return self._streams[label]

    def hold(self, stream: int, num_more: int) -> None:
        """Enqueues: continue when the ranks have met so many times more; 0 does not hold."""
        self._gate.wait(stream, self.num_meetings + num_more)

    def counter(self, source: int, target: int) -> Counter:
        """What ``source`` counts up and ``target`` waits for."""
        key = (source, target)
        if key not in self._counters:
            index = 1 + source * self.num_ranks + target
            self._counters[key] = self._board.counter(index, f"signal {source} -> {target}")
        return self._counters[key]

    def buffer(self, label: str) -> int:
        """Address of `BUFFER_BYTES` of device memory, made and filled once."""
        return int(self._block(label).address)

    def handle(self, label: str) -> str:
        """By which another rank opens a buffer."""
        handle: bytes = self._block(label).handle
        return handle.hex()

    def _block(self, label: str) -> Any:
        if label not in self._buffers:
            block = self._buffers[label] = self._pool.take(BUFFER_BYTES, label, "calibration")
            self.bench.fill(block.address, BUFFER_BYTES)
        return self._buffers[label]

    def opened(self, handle: str) -> int:
        """Address of another rank's buffer, opened once."""
        if handle not in self._opened:
            self._opened[handle] = OpenedMemory(self.driver, bytes.fromhex(handle), BUFFER_BYTES, "a rank's buffer")
        return self._opened[handle].address

    def close_staged(self) -> None:
        """Ends the staged transfers of an earlier step."""
        while self.staged_ends:
            self.staged_ends.pop().close()

    def close(self) -> Meeting:
        """Gives everything back; a meeting, since nobody's memory may go while others have it open."""
        self.close_staged()
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
        yield None
        for block in self._buffers.values():
            block.release()
        self._buffers.clear()
        self._pool.close()
        self._board.close()
        for stream in self._streams.values():
            self.driver.destroy_stream(stream)
        self._streams.clear()
        self.bench.close()
