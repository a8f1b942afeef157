"""Copies from GPU to host to GPU, for GPUs that cannot reach each other.

Chunks of pinned shared host memory are used in turn::

    sender's stream      (wait free[c] >= lap - 1) | copy device to chunk c | set full[c] = lap
    receiver's stream                                wait full[c] >= lap    | copy chunk c to device | set free[c] = lap

While one chunk goes up, the one before comes down: the link of each GPU carries one direction, so a value moves at the speed of
one pinned copy, plus one chunk's time. A stream memory operation takes the stream about 3 us, so they have streams of their own,
tied to the copies by events, and the copies follow each other without them; the sender does not wait at all for what its host can
see to be free. The hosts only enqueue. The sender enqueues as many chunks as are free; more follow when the receiver's host has
enqueued the chunks before (PL-5), which it does without waiting for its GPU. With as many chunks as the largest value has, one
exchange of records moves a value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from crossfade.device.driver import Driver, HostRange
from crossfade.device.records import Announced, ChunksEnqueued, ChunksFreeEnqueued, Record
from crossfade.device.signals import WORD_BYTES, Counter, HostBoard
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError
from crossfade.host.memory import PAGE_BYTES, Memory, align

__all__ = ["StagedLayout", "StagedReceiver", "StagedSender", "StagedStreams"]


@dataclass(frozen=True, slots=True)
class StagedLayout:
    """How the shared memory of one direction is used: signals first, then the chunks.

    Attributes:
        num_chunks: at least 2.
        chunk_bytes: a multiple of the page size. Small ones cost about 4 us each, a large one delays the end by its own time: for
            64 MB and a link of 55 GB/s, 3 MB is best (measured).
    """

    num_chunks: int = 8
    chunk_bytes: int = 3 << 20

    def __post_init__(self) -> None:
        if self.num_chunks < 2 or self.chunk_bytes <= 0 or self.chunk_bytes % PAGE_BYTES:
            raise ValueError(
                f"{self.num_chunks} chunks of {self.chunk_bytes} bytes\nhint: at least 2 chunks of whole pages ({PAGE_BYTES} bytes)"
            )

    @property
    def signal_bytes(self) -> int:
        """Where the chunks begin."""
        return align(2 * self.num_chunks * WORD_BYTES, PAGE_BYTES)

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.signal_bytes + self.num_chunks * self.chunk_bytes


class StagedStreams(NamedTuple):
    """The streams of one end. All of them may be one.

    Attributes:
        copies: moves the chunks. (One: over two, each chunk moved at half the speed, 64 MB took 0.6 ms longer.)
        waits: waits for the other side, ahead of the copies.
        sets: tells the other side, behind the copies.
    """

    copies: int
    waits: int
    sets: int


class _End:
    """What both ends hold: the chunks, their counters, and an event before and after the copy of each."""

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        layout: StagedLayout,
        streams: StagedStreams,
        tell: Callable[[Record], None],
        label: str,
    ) -> None:
        self.label = label
        self._driver = driver
        self._layout = layout
        self._streams = streams
        self._num_taken = 0
        self._tell = tell
        num = layout.num_chunks
        self._board = HostBoard(driver, memory, 2 * num, label)
        self._chunks: HostRange = driver.map_host(
            memory, layout.signal_bytes, num * layout.chunk_bytes, f"chunks of {label}"
        )
        self._full = [self._board.counter(c, f"full[{c}] of {label}") for c in range(num)]
        self._free = [self._board.counter(num + c, f"free[{c}] of {label}") for c in range(num)]
        self._before = [driver.create_event() for _ in range(num)]
        self._after = [driver.create_event() for _ in range(num)]
        self._joined = driver.create_event()
        for c in range(num):
            driver.name_range(self._chunk(c), layout.chunk_bytes, f"chunk {c} of {label}")
        self._ended: ChannelError | None = None

    def _chunk(self, index: int) -> int:
        return self._chunks.address + index * self._layout.chunk_bytes

    def _take(self) -> tuple[int, int]:
        """The next chunk, and the lap that it is in (from 1)."""
        lap, index = divmod(self._num_taken, self._layout.num_chunks)
        self._num_taken += 1
        return index, lap + 1

    def _wait(self, counter: Counter, value: int, index: int) -> None:
        """Lets a chunk's copy wait for a counter."""
        copies, waits, _ = self._streams
        counter.wait(waits, value)
        if waits != copies:
            self._driver.record_event(self._before[index], waits)
            self._driver.wait_event(copies, self._before[index])

    def _set(self, counter: Counter, value: int, index: int) -> None:
        """Sets a counter behind a chunk's copy."""
        copies, _, sets = self._streams
        if sets != copies:
            self._driver.record_event(self._after[index], copies)
            self._driver.wait_event(sets, self._after[index])
        counter.set(sets, value)

    def join(self, stream: int) -> None:
        """Lets ``stream`` wait for everything that this end was given so far."""
        self._driver.record_event(self._joined, self._streams.copies)
        self._driver.wait_event(stream, self._joined)

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    @property
    def is_done(self) -> bool:
        """Whether the device has finished everything that was enqueued."""
        return all(map(self._driver.is_idle, self._streams))

    def break_off(self, reason: str) -> None:
        """The other side is gone; calls raise `ChannelBroken` from now on."""
        self._ended = self._ended or ChannelBroken(f"{self.label}: {reason}")

    def close(self) -> None:
        """Unpins the memory. The streams must have finished (`is_done`). Idempotent.

        Raises:
            ChannelError: the streams have not finished.
        """
        if not self.is_done:
            raise ChannelError(
                f"{self.label}: copies are still under way",
                hint="wait for is_done, or release the signals that they wait for",
            )
        self._board.close()
        self._chunks.close()
        if self._before:
            for event in (*self._before, *self._after, self._joined):
                self._driver.destroy_event(event)
            self._before.clear()
        self._ended = self._ended or ChannelClosed(f"{self.label}: closed by this side")


class StagedSender(_End):
    """The sending end: first-in, first-out. One thread uses it; see the module for the arguments' meaning."""

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        layout: StagedLayout,
        streams: StagedStreams,
        tell: Callable[[Record], None],
        label: str,
    ) -> None:
        super().__init__(driver, memory, layout, streams, tell, label)
        self._credits = layout.num_chunks
        self._waiting: deque[tuple[int, int, int, Any]] = deque()  # address, bytes, offset, what to keep
        self._kept: deque[tuple[int, Any]] = deque()

    def send(self, address: int, size_bytes: int, *, ready: int | None = None, keep: Any = None) -> None:
        """Begins to move a value, behind those before it, as far as chunks are free; `pump` goes on.

        Args:
            address: where the value lies; it must not change until it is moved.
            size_bytes: its length.
            ready: an event that stands for the value's computation.
            keep: held until the value has left the device.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
        """
        self._check()
        if ready is not None:
            self._driver.wait_event(self._streams.copies, ready)
        self._tell(Announced(size_bytes))
        self._waiting.append((address, size_bytes, 0, keep))
        self.pump()

    def on_record(self, record: Record) -> None:
        """A record of the receiver's arrived."""
        if not isinstance(record, ChunksFreeEnqueued):
            raise ChannelError(f"{self.label}: a staged sender cannot take {record}: this is a bug in crossfade")
        self._credits += record.num_chunks
        self.pump()

    def pump(self) -> None:
        """Enqueues as many chunks as are free."""
        num_told = num_untold = 0
        while self._waiting and self._ended is None:
            address, size_bytes, offset, keep = self._waiting[0]
            while offset < size_bytes and self._credits:
                offset += self._enqueue(address + offset, size_bytes - offset)
                num_untold += 1
                if num_untold >= max(
                    num_told, 1
                ):  # after 1, 2, 4, ... chunks: the receiver begins early, and hears of many at once
                    self._tell(ChunksEnqueued(num_untold))
                    num_told, num_untold = num_told + num_untold, 0
            if offset < size_bytes:
                self._waiting[0] = (address, size_bytes, offset, keep)
                break
            self._waiting.popleft()
            if keep is not None:
                self._keep(keep)
        if num_untold:
            self._tell(ChunksEnqueued(num_untold))

    def _enqueue(self, address: int, left_bytes: int) -> int:
        (index, lap), length = self._take(), min(left_bytes, self._layout.chunk_bytes)
        self._credits -= 1
        if not self._free[index].has(lap - 1):
            self._wait(self._free[index], lap - 1, index)
        self._driver.copy(self._chunk(index), address, length, self._streams.copies)
        self._set(self._full[index], lap, index)
        return length

    def _keep(self, keep: Any) -> None:
        self.collect()
        event = self._driver.create_event()
        self._driver.record_event(event, self._streams.copies)
        self._kept.append((event, keep))

    def collect(self) -> None:
        """Lets go of values that have left the device."""
        while self._kept and self._driver.has_happened(self._kept[0][0]):
            self._driver.destroy_event(self._kept.popleft()[0])

    @property
    def is_flushed(self) -> bool:
        """Whether every chunk of every value has been enqueued."""
        return not self._waiting

    def signals(self) -> list[Counter]:
        """What this end's streams may wait for."""
        return list(self._free)

    def close(self) -> None:
        """See `_End.close`."""
        super().close()
        self.collect()


class StagedReceiver(_End):
    """The receiving end: first-in, first-out. One thread uses it; see the module for the arguments' meaning."""

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        layout: StagedLayout,
        streams: StagedStreams,
        tell: Callable[[Record], None],
        label: str,
    ) -> None:
        super().__init__(driver, memory, layout, streams, tell, label)
        self._announced: deque[int] = deque()
        self._num_arriving = 0  # chunks that are on their way and have no copy enqueued yet
        self._into: tuple[int, int] | None = None  # address, bytes left of the value that is being received

    def on_record(self, record: Record) -> None:
        """A record of the sender's arrived."""
        match record:
            case Announced(size_bytes):
                self._announced.append(size_bytes)
            case ChunksEnqueued(num_chunks):
                self._num_arriving += num_chunks
                self.pump()
            case _:
                raise ChannelError(f"{self.label}: a staged receiver cannot take {record}: this is a bug in crossfade")

    @property
    def next_bytes(self) -> int | None:
        """Length of the next value that `receive` can take; None while none is announced, or one is still being enqueued."""
        return self._announced[0] if self._announced and self._into is None else None

    def receive(self, address: int, *, ready: int | None = None) -> None:
        """Gives the next value a place in device memory; `is_enqueued` says when all of its copies are enqueued.

        Args:
            address: at least `next_bytes` of memory.
            ready: an event after which the memory may be written.

        Raises:
            ChannelClosed, ChannelBroken: see CH-2.
            ChannelError: no value is announced.
        """
        self._check()
        if self.next_bytes is None:
            raise ChannelError(f"{self.label}: there is no value to receive", hint="look at next_bytes first")
        if ready is not None:
            self._driver.wait_event(self._streams.copies, ready)
        size_bytes = self._announced.popleft()
        self._into = (address, size_bytes) if size_bytes else None
        self.pump()

    @property
    def is_enqueued(self) -> bool:
        """Whether all copies of the value of the last `receive` are enqueued, so that `join` stands for it."""
        return self._into is None

    def pump(self) -> None:
        """Enqueues the copies of chunks that are on their way."""
        num_chunks = 0
        while self._into is not None and self._num_arriving and self._ended is None:
            address, left_bytes = self._into
            (index, lap), length = self._take(), min(left_bytes, self._layout.chunk_bytes)
            self._wait(self._full[index], lap, index)
            self._driver.copy(address, self._chunk(index), length, self._streams.copies)
            self._set(self._free[index], lap, index)
            self._num_arriving -= 1
            num_chunks += 1
            self._into = (address + length, left_bytes - length) if left_bytes > length else None
        if num_chunks:
            self._tell(ChunksFreeEnqueued(num_chunks))

    def signals(self) -> list[Counter]:
        """What this end's streams may wait for."""
        return list(self._full)
