"""The writing end of every channel whose tensors travel apart from their message (``edges.carrier``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from crossfade.channels.protocol import ChannelStatistics
from crossfade.channels.values.codec import PLAIN_TYPES, is_plain
from crossfade.channels.values.device_codec import Split
from crossfade.edges.carrier import Outgoing
from crossfade.errors import CrossfadeError, Failure


class DeviceWriter:
    """Writes values: the message into the ring, which the carrier has, the tensors by the carrier."""

    on_moved: Callable[[int, int], None] | None = None  # the carriers' `recorded` tell more

    def __init__(self, carrier: Outgoing, distrust: Callable[[], CrossfadeError | None] | None = None) -> None:
        self.carrier = carrier
        self.name = carrier.ring.name
        self.ring = carrier.ring
        self.has_room = carrier.ring.has_room
        # Says why values cannot be trusted, if so: a party whose tensors they may be made of is dead (`DeviceEnds.distrust`).
        # Must not wait. None if values need no such look here.
        self._distrust = distrust
        self._try_send_tensor = carrier.try_send_tensor
        self._pending: tuple[object, Split] | None = None  # a value that there was no room for yet, taken apart

    def try_write(self, value: Any) -> bool:
        """On a device, the tensors of the value may be computed only by what is enqueued now. Raises a `ChannelBroken` if values
        cannot be trusted any more, and a `DeviceError` if there is no memory for the value, or the device refused.
        """
        if self._distrust is not None and (error := self._distrust()) is not None:
            self.break_off(str(error))
        if self._try_send_tensor is not None and (is_accepted := self._try_send_tensor(value)) is not None:
            return is_accepted
        if type(value) in PLAIN_TYPES or _has_no_tensor(value):
            return self.ring.try_write(value)
        if not self.has_room():
            return False
        if self._pending is None or self._pending[0] is not value:
            self._pending = (value, self.carrier.split(value))
        parts, is_accepted = self._pending[1], True
        try:
            if parts.tensors:
                is_accepted = self.carrier.try_send(parts)
            else:
                self.ring.stage(parts.message)
                self.ring.publish()
        except BaseException:
            self._pending = None
            raise
        if is_accepted:
            self._pending = None
        return is_accepted

    def try_flush(self) -> bool:
        return self.carrier.is_flushed()

    def end(self) -> None:
        """Nothing is written any more: the readers hear that no more values come."""
        self.ring.end()

    def break_off(self, reason: str) -> None:
        self.ring.break_off(reason)
        self.carrier.refuse(reason)

    def close(self) -> None:
        """The devices may be behind: continue with `drain`."""
        if not self.ring.is_closed:
            self._pending = None
            self.ring.is_closed = True
            self.carrier.leave()

    def drain(self) -> bool:
        return self.carrier.drain()

    def statistics(self) -> ChannelStatistics:
        return self.ring.statistics()


def _has_no_tensor(value: object) -> bool:
    """Whether there is no tensor in a value, as far as its type tells."""
    kind = type(value)
    if kind is Failure or is_plain(value):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject  # type: ignore[attr-defined]
