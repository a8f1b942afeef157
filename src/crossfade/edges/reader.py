"""The reading end of every channel whose tensors travel apart from their message (``edges.carrier``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.shm_reader import ShmReader
from crossfade.edges.arrivals import Coming
from crossfade.edges.carrier import Incoming


class DeviceReader:
    """Reads values: the message from the ring, the tensors by the carrier.

    Where the carrier has to be asked (`Incoming.requests`), a message is taken when the program has asked for its value
    (`try_start`); it lies in the inbox until everything that brings its tensors is enqueued.
    """

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, ring: ShmReader, carrier: Incoming) -> None:
        self.name = ring.name
        self.ring = ring
        self.carrier = carrier
        ring.decode, ring.read_record, ring.on_end = carrier.decode, carrier.read_record, carrier.forget
        self._requests = carrier.requests
        self._num_held = 0  # asked for and not yet released
        inbox: deque[object] = deque()
        self._inbox, has_no_record = inbox, self.ring.is_idle
        self.is_idle: Callable[[], bool] = has_no_record
        if self._requests is not None:
            self.is_idle = lambda: not inbox and has_no_record()  # without `self`: no end is part of a circle
        elif carrier.is_direct:
            self.try_read = ring.try_read  # type: ignore[method-assign]  # a call less on the way of each value

    def try_start(self) -> bool:
        if self._requests is None:
            return True
        if self.ring.is_closed or self._is_over():
            self.ring.raise_if_ended()
        if self._num_held >= self.ring.layout.depth:
            return False
        self._num_held += 1
        self._requests.add(self.take_record)
        return True

    def release(self) -> None:
        self._num_held -= 1

    def take_record(self) -> bool:
        """Takes the next message into the inbox; False if there is none."""
        if self.ring.is_idle():
            return False
        value = self.ring.try_read()
        if value is EMPTY:
            return False
        self._inbox.append(value)
        return True

    def discard(self) -> None:
        """Takes and drops all that has come."""
        while self.take_record():
            pass
        self._inbox.clear()

    def _is_over(self) -> bool:
        return self.ring.is_other_gone and self.ring.is_idle()

    def try_read(self) -> object:
        if self._requests is None:
            if not self.carrier.may_take():
                return EMPTY
            value = self.ring.try_read()
            return self.carrier.finish(value) if type(value) is Coming else value
        if self.ring.is_closed:
            self.ring.raise_if_ended()
        self._requests.take()
        if not self._inbox:
            if self._is_over():
                self.ring.raise_if_ended()
            return EMPTY
        value = self._inbox[0]
        if type(value) is Coming:
            if not self.carrier.is_here(value):
                return EMPTY
            value = self.carrier.finish(value)
        self._inbox.popleft()
        return value

    def break_off(self, reason: str) -> None:
        self.ring.break_off(reason)
        self.carrier.mute(reason)

    def close(self) -> None:
        """The devices may be behind: continue with `drain`."""
        if not self.ring.is_closed:
            self.ring.is_closed = True
            self._inbox.clear()
            self.carrier.leave()
        if not self.carrier.leaves_late:
            self.ring.leave()

    def drain(self) -> bool:
        is_drained = self.carrier.drain()
        if is_drained:
            self.ring.leave()
        return is_drained

    def statistics(self) -> ChannelStatistics:
        return self.carrier.statistics(self.ring)
