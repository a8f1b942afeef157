"""The in-process channel: values are copied, so that it gives what a ring between processes gives. The reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.values.codec import decode, message_of, undecodable
from crossfade.errors import ChannelBroken, ChannelClosed


class _Ring:
    """What the ends share: one queue of encoded messages for each reader."""

    def __init__(self, name: str, depth: int, num_readers: int) -> None:
        self.name = name
        self.depth = depth
        self.queues: list[deque[bytes]] = [deque() for _ in range(num_readers)]
        self.writer_gone = ""
        self.reader_gone = ""


def open_local(name: str, depth: int, num_readers: int) -> tuple[LocalWriter, list[LocalReader]]:
    """Both sides of a new channel, for one thread."""
    ring = _Ring(name, depth, num_readers)
    return LocalWriter(ring), [LocalReader(ring, index) for index in range(num_readers)]


class _End:
    """What both ends share."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        self._is_closed = False
        self._num_values = 0
        self._num_bytes = 0

    def _raise_if_ended(self, gone: str) -> None:
        if self._is_closed:
            raise ChannelClosed(f"channel {self._ring.name} was closed by this side")
        if gone:
            raise ChannelBroken(f"channel {self._ring.name} is broken: {gone}")

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._num_values, self._num_bytes)


class LocalWriter(_End):
    """The writing end."""

    def try_write(self, value: object) -> bool:
        if not self.has_room():
            return False
        data = message_of(value).to_bytes()
        for queue in self._ring.queues:
            queue.append(data)
        self._num_values += 1
        self._num_bytes += len(data)
        return True

    def has_room(self) -> bool:
        self._raise_if_ended(self._ring.reader_gone)
        return max(map(len, self._ring.queues)) < self._ring.depth

    def try_flush(self) -> bool:
        return True

    def break_off(self, reason: str) -> None:
        self._ring.reader_gone = reason

    def close(self) -> None:
        self._is_closed = True
        self._ring.writer_gone = self._ring.writer_gone or "the other side closed it"


class LocalReader(_End):
    """One reading end."""

    def __init__(self, ring: _Ring, index: int) -> None:
        super().__init__(ring)
        self._queue = ring.queues[index]

    def try_start(self) -> bool:
        return True

    def try_read(self) -> object:
        if self._is_closed or not self._queue:
            self._raise_if_ended(self._ring.writer_gone)
            return EMPTY
        message = self._queue.popleft()
        self._num_values += 1
        self._num_bytes += len(message)
        try:
            return decode(memoryview(message))
        except Exception as error:
            return undecodable(error, self._ring.name)

    @property
    def num_unread(self) -> int:
        return len(self._queue)

    def is_idle(self) -> bool:
        return not self._queue

    def release(self) -> None:
        """Nothing to do: a value that was read owns its memory."""

    def break_off(self, reason: str) -> None:
        self._ring.writer_gone = reason

    def close(self) -> None:
        self._is_closed = True
        self._ring.reader_gone = self._ring.reader_gone or "the other side closed it"
