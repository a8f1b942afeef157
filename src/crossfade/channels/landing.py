"""Where the values of a channel between hosts come down (`channels.tcp`): the writing end of a ring that its readers share."""

from __future__ import annotations

from collections.abc import Callable

from crossfade.channels.shm_ring import ShmWriter
from crossfade.errors import ChannelError


class Landing:
    """Where the values of a channel come down on the readers' host: the writing end of their ring.

    The writer's tokens (`channels.tcp`) stand for records that are free. The ring says what its readers have given back
    (`collect`); an only reader that is a `TcpReader` counts by itself what it has read (``is_counted``), which is quicker. A short
    value for which such a reader is asking when it comes does not pass the ring: it is ``come``, its kind and its bytes.
    """

    def __init__(self, ring: ShmWriter, *, is_counted: bool = False) -> None:
        self.ring = ring
        self.is_counted = is_counted
        self.most_due = max(1, ring.layout.depth // 2)  # tokens: of so many the writer may need one
        self.num_read = 0  # where it is counted; changed by the reader's thread
        self.num_freed = 0  # records, where it is not; changed under the wire's lock for receiving
        self.num_returned = 0  # tokens; changed under the wire's lock for sending
        self.come: tuple[int, bytes] | None = None
        self.is_empty: Callable[[], bool] = _never  # whether nothing lies in the ring, as its only reader sees it
        self.is_over = False
        self.is_refused = False  # by a reader; the writer is to be told
        if not is_counted:
            self.collect()  # the ring is empty: the writer has these tokens
            self.num_freed = 0

    @property
    def num_due(self) -> int:
        """How many tokens are to be given back."""
        return (self.num_read if self.is_counted else self.num_freed) - self.num_returned

    def collect(self) -> bool:
        """Looks what the readers have given back. Whether that is anything, or a reader has closed its end."""
        num = 0
        try:
            while not self.is_over and self.ring.take_room():
                num += 1
        except ChannelError:
            self.is_refused = True
            self.end()
        self.num_freed += num
        return num > 0 or self.is_refused

    def _is_open(self) -> bool:
        """Whether the next record can be written. It is free: the writer had a token for it."""
        if self.is_counted and not self.is_over:
            try:
                self.ring.has_room()
            except ChannelError:  # the reader has closed its end
                self.end()
        return not self.is_over

    def has_nothing(self) -> bool:
        """Whether the next value that comes is the one that its only reader is asking for."""
        return self.come is None and not self.is_over and self.is_empty()

    def stage(self, kind: int, payload: bytes) -> None:
        """A value for a record has come."""
        if self._is_open():
            self.ring.stage_record(kind, payload)
            self.ring.publish()

    def begin(self, kind: int, size: int) -> tuple[memoryview, Callable[[], None]]:
        """A value for a slot comes: where it goes, and what is to be done when it has come whole."""
        if self.is_over:
            return memoryview(bytearray(size)), lambda: None
        place, view = self.ring.reserve(size)

        def finish() -> None:
            if self._is_open():
                self.ring.stage_reserved(place, size, kind)
                self.ring.publish()

        return view[:size], finish

    def end(self) -> None:
        """No more comes; readers take what has."""
        if not self.is_over:
            self.is_over = True
            self.ring.close()


def _never() -> bool:
    return False
