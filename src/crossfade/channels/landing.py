"""Where the values of a channel between hosts come down (`channels.tcp`): the writing end of a ring that its readers share."""

from __future__ import annotations

from collections.abc import Callable

from crossfade.channels.shm_ring import ShmWriter
from crossfade.errors import ChannelError


class Landing:
    """Where the values of a channel come down on the readers' host: the writing end of their ring."""

    def __init__(self, ring: ShmWriter) -> None:
        self.ring = ring
        self.due = 0  # tokens to give back; under the wire's lock for sending
        self.is_over = False
        self.is_refused = False  # by a reader; the writer is to be told
        self.collect()  # the ring is empty: the writer has these tokens

    @property
    def is_due(self) -> bool:
        """Whether so many tokens are due that the writer may need them."""
        return self.due >= max(1, self.ring.layout.depth // 2)

    def collect(self) -> int:
        """How many records the readers have given back since the last call."""
        num = 0
        try:
            while not self.is_over and self.ring.take_room():
                num += 1
        except ChannelError:  # a reader has closed its end
            self.is_refused = True
            self.end()
        return num

    def stage(self, kind: int, payload: memoryview) -> None:
        """A value for a record has come."""
        if not self.is_over:
            self.ring.stage_record(kind, bytes(payload))
            self.ring.publish()

    def begin(self, kind: int, size: int) -> tuple[memoryview, Callable[[], None]]:
        """A value for a slot comes: where it goes, and what is to be done when it has come whole."""
        if self.is_over:
            return memoryview(bytearray(size)), lambda: None
        place, view = self.ring.reserve(size)

        def finish() -> None:
            if not self.is_over:
                self.ring.stage_reserved(place, size, kind)
                self.ring.publish()

        return view[:size], finish

    def end(self) -> None:
        """No more comes; readers take what has."""
        if not self.is_over:
            self.is_over = True
            self.ring.close()
