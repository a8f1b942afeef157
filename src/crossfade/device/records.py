"""What the two hosts of a ring tell each other: a few words ahead of the value, a few words back.

A record says what its sender *has enqueued*. That is what makes a wait for it safe (PL-5): the signal will be set without any
further help from a host. How records travel is the caller's business, as long as they arrive in order and what was done before
one was sent is seen after it was read.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from crossfade.errors import ChannelError

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """As bytes it is an array: its tag, then its fields in their order."""


class Enqueued(_Record, frozen=True, tag=0):
    """Sender to receiver: the copy into a slot and the setting of its ``full`` are enqueued."""

    generation: Number
    slot: Number
    size_bytes: Number


class FreeEnqueued(_Record, frozen=True, tag=1):
    """Receiver to sender: the setting of a slot's ``free`` is enqueued, behind the last use of the value in it."""

    generation: Number
    slot: Number


class Wanted(_Record, frozen=True, tag=2):
    """Sender to receiver: a value of this length does not fit; please offer larger slots."""

    size_bytes: Number


class Offer(_Record, frozen=True, tag=3):
    """Receiver to sender: slots to use from now on, all of them free. Slot ``k`` begins at ``k * slot_bytes``."""

    generation: Number  # counts offers, from 0
    group: Number  # which signals of the board belong to them
    num_slots: Number
    slot_bytes: Number
    handle: bytes  # by which the memory is opened


class Refused(_Record, frozen=True, tag=9):
    """Receiver to sender: there is no memory for slots of that length."""

    size_bytes: Number  # the value that was asked for
    reason: str  # why, for people; what does not fit into a record is cut off


class Retired(_Record, frozen=True, tag=4):
    """Sender to receiver: the slots of a generation are closed here, all copies into them are done."""

    generation: Number
    num_values: Number  # how many were sent through it


class Finished(_Record, frozen=True, tag=8):
    """Sender to receiver: this side is closed; offers that it has not retired were not used, and no more are wanted."""


class Announced(_Record, frozen=True, tag=5):
    """Staged sender to receiver: the next value is this long."""

    size_bytes: Number


class ChunksEnqueued(_Record, frozen=True, tag=6):
    """Staged sender to receiver: so many more chunks are on their way into the host's memory."""

    num_chunks: Number


class ChunksFreeEnqueued(_Record, frozen=True, tag=7):
    """Staged receiver to sender: the ``free`` of so many more chunks is enqueued."""

    num_chunks: Number


Record: TypeAlias = (
    Enqueued
    | FreeEnqueued
    | Wanted
    | Offer
    | Refused
    | Retired
    | Finished
    | Announced
    | ChunksEnqueued
    | ChunksFreeEnqueued
)

_DECODER = msgspec.msgpack.Decoder(Record)
_REASON_BYTES = 80


def pack(record: Record) -> bytes:
    """A record as bytes: at most 100 of them."""
    if isinstance(record, Refused):
        record = Refused(record.size_bytes, record.reason.encode()[:_REASON_BYTES].decode(errors="ignore"))
    return msgspec.msgpack.encode(record)


def unpack(data: bytes) -> Record:
    """The record that `pack` made bytes of. Raises a `ChannelError` for bytes of no record."""
    try:
        record: Record = _DECODER.decode(data)
    except msgspec.MsgspecError:
        raise ChannelError(f"{len(data)} bytes are not a record of a device ring") from None
    return record
