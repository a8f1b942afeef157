"""Channels between hosts: what is written on one host lands in a shared-memory ring of the other.

A *wire* is one TCP connection between two processes, for all channels between them in both directions (`channels.wire`). The end of
a channel where its readers are is the *landing*: the process of the first of them receives each value once, straight into a slot of
a ring that all readers of that host share (`channels.shm_ring`), and reads it from there as they do. So the wire is crossed once
for each host, and whatever holds for rings holds for readers: views, kept values, credits.

Who waits for what (depth D): a writer has D *tokens*, takes one for each value, and gets it back once all readers of the landing
have given the record's credit (PL-3). So a landing always has room for what comes. A token travels with the next value that goes
the other way, or when its process looks for work, or once half of them are due: fewer are never held back than that one is there.

What a writer accepted and the connection has not taken is copied and sent later (CH-1), or from where it lies if it is read-only.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Final

from crossfade.channels.landing import Landing
from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.ring_layout import BYTES, INLINE_BYTES, PICKLE, SLOT_BYTES, SLOT_MESSAGE
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.values.codec import PLAIN_TYPES, message_of, prepare
from crossfade.channels.values.layout import Encoded, Pickled, encode
from crossfade.channels.wire import Wire
from crossfade.channels.wire_frames import padded
from crossfade.errors import ChannelBroken, ChannelClosed
from crossfade.host.cores import Core

_NAP_MS: Final = 1
_LOOK_NS: Final = 120_000
"""An answer that takes no work is there by then: a few packets take 30 us there and back, and 60 us where the machine is busy."""


class TcpWriter:
    """The writing end."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, name: str, wire: Wire, channel: int, depth: int) -> None:
        self.name = name
        self._wire = wire
        self._channel = channel
        self._num_given = depth  # tokens, ever; changed by whoever receives
        self._num_taken = 0  # changed by the writer's thread
        self._reason = ""
        self.is_closed = False
        self._has_left = False
        self._staged: bytes | Encoded = b""
        self._num_values = 0
        self._num_bytes = 0
        wire.add_writer(channel, self)

    def add_tokens(self, number: int) -> None:
        """The landing gives tokens back."""
        self._num_given += number

    def try_write(self, value: object) -> bool:
        if not self.has_room():
            return False
        if type(value) is bytes:
            if len(value) <= INLINE_BYTES:
                self._send_small(BYTES, value)
            else:
                self._send(SLOT_BYTES, [value], len(value))
        else:
            data = pickle.dumps(value, 5) if type(value) in PLAIN_TYPES else prepare(value)
            is_long = isinstance(data, bytes) and len(data) > INLINE_BYTES
            self._send_message(message_of(value) if is_long else data)
        return True

    def stage(self, message: bytes | Encoded) -> None:
        """The next value's pickle, or its message. Nothing is sent before `publish`. There must be room."""
        self._staged = (
            encode(Pickled(message, ())) if isinstance(message, bytes) and len(message) > INLINE_BYTES else message
        )

    def publish(self) -> None:
        """Sends what is staged."""
        self._send_message(self._staged)

    def _send_message(self, message: bytes | Encoded) -> None:
        if isinstance(message, bytes):
            self._send_small(PICKLE, message)
        elif message.size_bytes <= INLINE_BYTES:
            self._send_small(SLOT_MESSAGE, b"".join(padded(message)))
        else:
            self._send(SLOT_MESSAGE, padded(message), message.size_bytes)

    def _send(self, kind: int, parts: Sequence[bytes | memoryview], size: int) -> None:
        self._num_taken += 1
        self._num_values += 1
        self._num_bytes += size
        self._wire.send(self._channel, kind, parts, size)

    def _send_small(self, kind: int, payload: bytes) -> None:
        self._num_taken += 1
        self._num_values += 1
        self._wire.send_small(self._channel, kind, payload)

    def has_room(self) -> bool:
        if self._wire.fault or self._reason or self.is_closed:
            self._raise_if_ended()
        if self._num_given == self._num_taken:
            self._wire.pump()
            self._raise_if_ended()
        return self._num_given > self._num_taken

    def _raise_if_ended(self) -> None:
        if self.is_closed:
            raise ChannelClosed(f"channel {self.name} was closed by this side")
        if self._reason or self._wire.fault:
            raise ChannelBroken(f"channel {self.name} is broken: {self._reason or self._wire.fault}")

    def try_flush(self) -> bool:
        self._wire.pump()
        return not self._wire.has_unsent

    def break_off(self, reason: str) -> None:
        self._reason = self._reason or reason

    def end(self) -> None:
        """Once nothing is written any more: the readers hear that no more values come. Idempotent."""
        if not self._has_left:
            self._has_left = True
            self._wire.send_end(self._channel)

    def leave(self) -> None:
        self.end()

    def close(self) -> None:
        self.is_closed = True
        self.end()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._num_values, self._num_bytes)


class TcpReader:
    """The reading end in the process of the landing: looks at the wire itself while it has nothing else to do."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, ring: ShmReader, wire: Wire, landing: Landing) -> None:
        self._ring = ring
        self._wire = wire
        self._landing = landing
        self._has_nothing = landing.is_empty = ring.is_idle
        self._asking = landing if landing.is_counted else None
        self._core = Core()
        self._may_nap = True
        self._idle_since_ns = 0  # since when it has looked in vain after the last value; 0 if it has not

    def try_start(self) -> bool:
        return True

    def try_read(self) -> object:
        ring, wire, landing = self._ring, self._wire, self._landing
        come = landing.come
        if come is None and self._has_nothing() and not ring.is_closed:
            wire.attend(self._asking)
            come = landing.come
            if come is None and ring.is_other_gone and wire.fault and self._has_nothing():
                ring.break_off(wire.fault)
        if come is None:
            value = ring.try_read()
            if value is EMPTY:
                return EMPTY
        else:
            kind, payload = come
            value = ring.value_of(kind, payload)
            landing.come = None
        self._may_nap, self._idle_since_ns = True, 0
        landing.num_read += 1
        wire.owes = True
        if not landing.is_counted or landing.num_read - landing.num_returned >= landing.most_due:
            wire.give_back(landing)
        return value

    def is_idle(self) -> bool:
        """Looks at the wire, and gives way to others who want the core: a look is several system calls, so fifty in a row, as
        `Doorbell` makes them, would keep the other side waiting where both share a core. Once after each value, having looked in
        vain, it sleeps. What has come is left to `try_read`.
        """
        if self._landing.come is not None or not self._has_nothing():
            return False
        nap_ms = 0
        if self._may_nap:
            now_ns = time.monotonic_ns()
            self._idle_since_ns = self._idle_since_ns or now_ns
            if now_ns - self._idle_since_ns > _LOOK_NS:
                self._may_nap = False
                nap_ms = _NAP_MS
        if self._wire.look(nap_ms):
            return False
        self._core.give_way()
        return True

    def release(self) -> None:
        """Nothing to do: a slot is free when its last view dies."""

    def break_off(self, reason: str) -> None:
        self._ring.break_off(reason)

    def close(self) -> None:
        self._ring.close()
        self._wire.close_landing(self._landing)

    def statistics(self) -> ChannelStatistics:
        return self._ring.statistics()
