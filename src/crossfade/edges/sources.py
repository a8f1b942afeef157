"""A writer's devices, as the carriers of its tensors use them, and what its readers hear where a tensor cannot be sent."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from crossfade.channels.ring_layout import INLINE_BYTES
from crossfade.channels.values.device_codec import Split, Splitter
from crossfade.device.context import DeviceContext, source_of
from crossfade.edges.carrier import Outgoing
from crossfade.errors import ChannelBroken, CrossfadeError, Failure

_MOST_CHARACTERS = 240


def places_from(parts: Split) -> dict[int, list[tuple[int, int, int]]]:
    """Of each of the writer's devices, the tensors that hold anything: (offset in its part of the value, address, length)."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for each in parts.tensors:
        if each.size_bytes:
            places.setdefault(each.lane, []).append((each.offset, each.tensor.data_ptr(), each.size_bytes))
    return places


def cannot_send(carrier: Outgoing, error: Exception) -> ChannelBroken:
    """Breaks a channel of which some readers may have got a value and others have not."""
    reason = f"a tensor could not be sent: {error}"
    carrier.ring.break_off(reason)
    carrier.refuse(reason)
    return ChannelBroken(f"channel {carrier.ring.name} is broken: {error}")


def short_failure(error: CrossfadeError, actor: str, node: str) -> bytes:
    """The pickle of an error of its kind that fits into a record, for the reader that waits for the value."""
    num = _MOST_CHARACTERS
    while True:
        failure = Failure.capture(type(error)(str(error)[:num]), actor=actor, node=node[:num])
        data = pickle.dumps(failure, 5)
        if len(data) <= INLINE_BYTES:
            return data
        num //= 2


class Sources:
    """Takes values apart whose tensors lie on some devices, and marks when these are computed. ``homes``: the devices, in order;
    ``note_bytes``: of the carrier's notes in the message of such a value.
    """

    def __init__(self, homes: Sequence[DeviceContext], note_bytes: int) -> None:
        self.homes = homes
        # Of each device, an event behind the computation of the value that was taken apart last.
        self.ready = [home.driver.create_event() for home in homes]
        self.source_of = source_of(homes)  # the position of a tensor's device; None if it is none of them
        self.splitter = Splitter(self.source_of, note_bytes)

    def split(self, value: object) -> Split:
        """Takes a value apart; its tensors may be computed only by what is enqueued now. Raises what pickling raised."""
        parts = self.splitter.split(value)
        for source in parts.lane_bytes:
            self.mark_ready(source)
        return parts

    def mark_ready(self, source: int) -> None:
        """Records the event of one device."""
        home = self.homes[source]
        home.driver.record_event(self.ready[source], home.compute_stream())

    def close(self) -> None:
        """Gives the events back. Idempotent."""
        for home, event in zip(self.homes, self.ready, strict=False):
            home.driver.destroy_event(event)
        self.ready = []
