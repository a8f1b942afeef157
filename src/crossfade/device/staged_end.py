"""What both ends of staged copies have in common (staged.py tells the whole)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

from crossfade.device.completion import CompletionMark
from crossfade.device.driver import Driver, HostRange
from crossfade.device.recorded import Around
from crossfade.device.records import Record
from crossfade.device.signals import Counter, HostBoard
from crossfade.device.staged_layout import StagedLayout
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError, DeviceError
from crossfade.host.memory import Memory


class StagedStreams(NamedTuple):
    """The streams of one end. All of them may be one."""

    copies: int  # moves the chunks. (One: over two, each chunk moved at half the speed, 64 MB took 0.6 ms longer.)
    waits: int  # waits for the other side, ahead of the copies
    sets: int  # tells the other side, behind the copies


@dataclass(slots=True)
class Rest:
    """What is left of a value: (offset, address, length) of its parts, its chunks, what to keep until they are moved, whose
    execution's it is where somebody records.
    """

    parts: deque[tuple[int, int, int]]
    lengths: deque[int]
    keep: Any = None
    execution: int | None = None
    offset: int = 0

    def take(self) -> list[tuple[int, int, int]]:
        """The pieces of the next chunk: (offset in the chunk, address, length)."""
        begin, end = self.offset, self.offset + self.lengths.popleft()
        self.offset = end
        pieces = []
        while self.parts and self.parts[0][0] < end:
            offset, address, length = self.parts.popleft()
            size_bytes = min(length, end - offset)
            pieces.append((offset - begin, address, size_bytes))
            if size_bytes < length:
                self.parts.appendleft((end, address + size_bytes, length - size_bytes))
        return pieces


class StagedEnd:
    """The chunks and the two counters, as both ends have them."""

    def __init__(
        self,
        driver: Driver,
        memory: Memory,  # shared by both sides, zeroed, with room for ``layout.size_bytes`` bytes at ``offset``
        layout: StagedLayout,  # the same on both sides
        streams: StagedStreams,  # this end's; others may use them as well
        tell: Callable[[Record], None],  # takes records to the other side, in order
        label: str,
        offset: int = 0,  # a multiple of the page size
    ) -> None:
        self.label = label
        # Called with the copies' stream before a chunk is copied, behind what that waits for; what it gives is called behind it.
        # None, the default, costs nothing.
        self.around: Around | None = None
        self._driver = driver
        self._layout = layout
        self._streams = streams
        self._tell = tell
        self._number = 0  # of the last chunk
        self._board = HostBoard(driver, memory, 2, label, offset)
        self._full = self._board.counter(0, f"full of {label}")
        self._free = self._board.counter(1, f"free of {label}")
        size_bytes = layout.num_chunks * layout.chunk_bytes
        try:
            self._chunks: HostRange = driver.map_host(
                memory, offset + layout.signal_bytes, size_bytes, f"chunks of {label}"
            )
        except BaseException:
            self._board.close()
            raise
        for index in range(layout.num_chunks):
            place = self._chunks.address + index * layout.chunk_bytes
            driver.name_range(place, layout.chunk_bytes, f"chunk {index} of {label}")
        self._waited, self._copied = driver.create_event(), driver.create_event()
        self._tail = CompletionMark(driver, streams)
        self._ended: ChannelError | None = None
        self._is_closed = False

    def _next_chunk(self) -> int:
        """Counts a chunk, and says where it lies."""
        index = self._number % self._layout.num_chunks
        self._number += 1
        return self._chunks.address + index * self._layout.chunk_bytes

    def _wait(self, counter: Counter, value: int) -> None:
        """Lets the copies wait for a counter, unless it is seen to be there."""
        if counter.has(value):
            return
        copies, waits, _ = self._streams
        counter.wait(waits, value)
        if waits != copies:
            self._driver.record_event(self._waited, waits)
            self._driver.wait_event(copies, self._waited)

    def _set(self, counter: Counter, value: int) -> None:
        copies, _, sets = self._streams
        if sets != copies:
            self.join(sets)
        counter.set(sets, value)

    @property
    def _execution(self) -> int | None:
        """Whose the value is that begins now: chunks may follow when the program is further on."""
        return None if self.around is None else self.around.execution

    def _copy(self, copies: Sequence[tuple[int, int, int]], execution: int | None) -> None:
        """Enqueues copies: (target, source, length) of each."""
        stream = self._streams.copies
        end = self.around(stream, execution) if self.around is not None and copies else None
        for target, source, size_bytes in copies:
            self._driver.copy(target, source, size_bytes, stream)
        if end is not None:
            end(sum(size_bytes for _, _, size_bytes in copies))

    def _go_on(self) -> None:
        """Enqueues what can be. A chunk that is enqueued half-way ends this: the next one would be taken for it. Raises a
        `DeviceError` if the driver failed.
        """
        try:
            self._pump()
        except DeviceError as error:
            self.break_off(str(error))
            raise

    def _pump(self) -> None:
        raise NotImplementedError

    def join(self, stream: int) -> None:
        """Lets ``stream`` wait for everything that this end was given until now."""
        self._driver.record_event(self._copied, self._streams.copies)
        self._driver.wait_event(stream, self._copied)

    def _check(self) -> None:
        if self._ended is not None:
            raise copy(self._ended)

    @property
    def is_done(self) -> bool:
        """Whether the device has finished everything that was enqueued here."""
        return self._tail.has_passed()

    def break_off(self, reason: str) -> None:
        """The other side or another party is gone: calls raise `ChannelBroken`, no chunk is enqueued. Any thread may call it."""
        self._ended = self._ended or ChannelBroken(f"{self.label}: {reason}")

    @property
    def ended(self) -> ChannelError | None:
        """What calls raise, once it has ended."""
        return self._ended

    def close(self) -> None:
        """Unpins the memory. The device must have finished (`is_done`), else a `ChannelError` is raised. Idempotent."""
        if self._is_closed:
            return
        if not self.is_done:
            raise ChannelError(
                f"{self.label}: copies are still under way",
                hint="wait for is_done, or release the signals that they wait for",
            )
        self._is_closed = True
        self._board.close()
        self._chunks.close()
        self._tail.close()
        for event in (self._waited, self._copied):
            self._driver.destroy_event(event)
        self._ended = self._ended or ChannelClosed(f"{self.label}: closed by this side")
