"""Copies from GPU to host to GPU, for GPUs that cannot reach each other.

Chunks of pinned shared host memory are used in turn. With chunks counted from 1, of which C fit into the memory::

    sender's stream      (wait free >= n - C) | copy device to chunk n | set full = n
    receiver's stream    (wait full >= n)     | copy chunk n to device | set free = n  (after every few chunks, and each value)

While one chunk goes up, the one before comes down: the link of each GPU carries one direction, and staged_layout.py says what that
comes to. A stream memory operation takes the stream about 3 us, so they have streams of their own, tied to the copies by events,
and the copies follow each other without them; neither side waits on a stream for what its host can see to be there. The hosts only
enqueue. The sender enqueues as many chunks as are free; more follow when the receiver's host has enqueued that chunks become
free (PL-5), which it does without waiting for its GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from crossfade.device.driver import Driver
from crossfade.device.records import Announced, ChunksEnqueued, ChunksFreeEnqueued, Record
from crossfade.device.signals import Counter
from crossfade.device.staged_end import Rest, StagedEnd, StagedStreams
from crossfade.device.staged_layout import StagedLayout
from crossfade.errors import ChannelError
from crossfade.host.memory import Memory

__all__ = ["StagedLayout", "StagedReceiver", "StagedSender", "StagedStreams"]


class StagedSender(StagedEnd):
    """The sending end: first-in, first-out. One thread uses it; `StagedEnd` has the arguments."""

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        layout: StagedLayout,
        streams: StagedStreams,
        tell: Callable[[Record], None],
        label: str,
        offset: int = 0,
    ) -> None:
        super().__init__(driver, memory, layout, streams, tell, label, offset)
        self._credits = layout.num_chunks
        self._waiting: deque[Rest] = deque()
        self._kept: deque[tuple[int, Any]] = deque()

    def send(self, address: int, size_bytes: int, *, ready: int | None = None, keep: Any = None) -> None:
        """Begins to move a value, behind those before it, as far as chunks are free; `on_record` continues. Raises `ChannelClosed`
        or `ChannelBroken` (CH-2).

        The value must not change until it is moved, and ``keep`` is held until it has left the device. ``ready`` is an event behind
        its computation.
        """
        self.send_parts([(0, address, size_bytes)], ready=ready, keep=keep)

    def send_parts(self, parts: Sequence[tuple[int, int, int]], *, ready: int | None = None, keep: Any = None) -> None:
        """`send` of a value that lies in several places, with (offset in the value, address, length) of each in order, none over
        another. The bytes between its parts are undefined.
        """
        self._check()
        if ready is not None:
            self._driver.wait_event(self._streams.copies, ready)
        size_bytes = parts[-1][0] + parts[-1][2] if parts else 0
        self._tell(Announced(size_bytes))
        self._waiting.append(Rest(deque(parts), deque(self._layout.lengths(size_bytes)), keep, self._execution))
        self._go_on()

    def on_record(self, record: Record) -> None:
        if not isinstance(record, ChunksFreeEnqueued):
            raise ChannelError(f"{self.label}: a staged sender cannot take {record}: this is a bug in crossfade")
        self._credits += record.num_chunks
        self._go_on()

    def _pump(self) -> None:
        """Enqueues as many chunks as are free, and tells after 1, 2, 4, ...: the receiver begins early, with few messages."""
        num_told = num_untold = 0
        while self._waiting and self._ended is None:
            value = self._waiting[0]
            while value.lengths and self._credits:
                self._enqueue(value.take(), value.execution)
                num_untold += 1
                if num_untold >= max(num_told, 1):
                    self._tell(ChunksEnqueued(num_untold))
                    num_told, num_untold = num_told + num_untold, 0
            if value.lengths:
                break
            self._waiting.popleft()
            if value.keep is not None:
                self._keep(value.keep)
        if num_untold:
            self._tell(ChunksEnqueued(num_untold))

    def _enqueue(self, pieces: list[tuple[int, int, int]], execution: int | None) -> None:
        self._credits -= 1
        self._tail.is_longer = True
        chunk = self._next_chunk()
        if self._number > self._layout.num_chunks:
            self._wait(self._free, self._number - self._layout.num_chunks)
        self._copy([(chunk + offset, address, size_bytes) for offset, address, size_bytes in pieces], execution)
        self._set(self._full, self._number)

    def _keep(self, keep: Any) -> None:
        self.collect()
        event = self._driver.create_event()
        self._driver.record_event(event, self._streams.copies)
        self._kept.append((event, keep))

    def collect(self) -> None:
        """Releases values that have left the device."""
        while self._kept and self._driver.has_happened(self._kept[0][0]):
            self._driver.destroy_event(self._kept.popleft()[0])

    @property
    def is_flushed(self) -> bool:
        """Whether every chunk of every value has been enqueued."""
        return not self._waiting

    def signals(self) -> list[Counter]:
        """What this end's streams may wait for."""
        return [self._free]

    def close(self) -> None:
        """Also raises a `ChannelError` if values are waiting for chunks, and the receiver is not known to be gone."""
        if self._waiting and self._ended is None:
            raise ChannelError(
                f"{self.label}: {len(self._waiting)} values are not sent yet", hint="wait until is_flushed"
            )
        super().close()
        self._waiting.clear()
        self.collect()


class StagedReceiver(StagedEnd):
    """The receiving end: first-in, first-out. One thread uses it; `StagedEnd` has the arguments."""

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        layout: StagedLayout,
        streams: StagedStreams,
        tell: Callable[[Record], None],
        label: str,
        offset: int = 0,
    ) -> None:
        super().__init__(driver, memory, layout, streams, tell, label, offset)
        self._announced: deque[int] = deque()
        self._num_arriving = 0  # chunks that are on their way and have no copy enqueued yet
        self._num_unfreed = 0  # chunks whose copy is enqueued, and their ``free`` is not
        self._into: Rest | None = None  # the value that is being received

    def on_record(self, record: Record) -> None:
        match record:
            case Announced(size_bytes):
                self._announced.append(size_bytes)
            case ChunksEnqueued(num_chunks):
                self._num_arriving += num_chunks
                self._go_on()
            case _:
                raise ChannelError(f"{self.label}: a staged receiver cannot take {record}: this is a bug in crossfade")

    @property
    def next_bytes(self) -> int | None:
        """Length of the next value that `receive` can take; None while none is announced, or one is still being enqueued."""
        return self._announced[0] if self._announced and self._into is None else None

    def receive(self, address: int | None, *, ready: int | None = None, execution: int | None = None) -> None:
        """Gives the next value a place of at least `next_bytes` in device memory; None lets the value go by. `is_enqueued` says
        when all of its copies are enqueued.

        ``ready`` is an event after which the memory may be written; ``execution`` is for the recorder (None for the one at which
        the program is). Raises `ChannelClosed` or `ChannelBroken` (CH-2), and a `ChannelError` if no value is announced.
        """
        self._check()
        if self.next_bytes is None:
            raise ChannelError(f"{self.label}: there is no value to receive", hint="look at next_bytes first")
        if ready is not None:
            self._driver.wait_event(self._streams.copies, ready)
        size_bytes = self._announced.popleft()
        lengths = self._layout.lengths(size_bytes)
        parts = [] if address is None else [(0, address, size_bytes)]
        whose = self._execution if execution is None else execution
        self._into = Rest(deque(parts), deque(lengths), execution=whose) if lengths else None
        self._go_on()

    @property
    def is_enqueued(self) -> bool:
        """Whether all copies of the value of the last `receive` are enqueued, so that `join` stands for it."""
        return self._into is None

    def _pump(self) -> None:
        """Enqueues the copies of chunks that are on their way."""
        while self._into is not None and self._num_arriving and self._ended is None:
            self._num_arriving -= 1
            self._num_unfreed += 1
            self._enqueue(self._into.take(), self._into.execution)
            if not self._into.lengths:
                self._into = None
            if self._into is None or self._num_unfreed >= self._layout.free_every:
                self._set(self._free, self._number)
                self._tell(ChunksFreeEnqueued(self._num_unfreed))
                self._num_unfreed = 0

    def _enqueue(self, pieces: list[tuple[int, int, int]], execution: int | None) -> None:
        self._tail.is_longer = True
        chunk = self._next_chunk()
        self._wait(self._full, self._number)
        self._copy([(address, chunk + offset, size_bytes) for offset, address, size_bytes in pieces], execution)

    def signals(self) -> list[Counter]:
        """What this end's streams may wait for."""
        return [self._full]
