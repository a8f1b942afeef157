"""What the two hosts of a ring tell each other: a few words ahead of the value, a few words back.

A record says what its sender *has enqueued*. That is what makes a wait for it safe (PL-5): the signal will be set without any
further help from a host. How records travel is the caller's business, as long as they arrive in order and what was done before
one was sent is seen after it was read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

from crossfade.errors import ChannelError


@dataclass(frozen=True, slots=True)
class Enqueued:
    """Sender to receiver: the copy into a slot and the setting of its ``full`` are enqueued."""

    generation: int
    slot: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FreeEnqueued:
    """Receiver to sender: the setting of a slot's ``free`` is enqueued, behind the last use of the value in it."""

    generation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sender to receiver: a value of this length does not fit; please offer larger slots."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Receiver to sender: slots to use from now on, all of them free. Slot ``k`` begins at ``k * slot_bytes``."""

    generation: int  # counts offers, from 0
    group: int  # which signals of the board belong to them
    num_slots: int
    slot_bytes: int
    handle: bytes  # by which the memory is opened


@dataclass(frozen=True, slots=True)
class Refused:
    """Receiver to sender: there is no memory for slots of that length."""

    size_bytes: int  # the value that was asked for
    reason: str  # why, for people; what does not fit into a record is cut off


@dataclass(frozen=True, slots=True)
class Retired:
    """Sender to receiver: the slots of a generation are closed here, all copies into them are done."""

    generation: int
    num_values: int  # how many were sent through it


@dataclass(frozen=True, slots=True)
class Finished:
    """Sender to receiver: this side is closed; offers that it has not retired were not used, and no more are wanted."""


@dataclass(frozen=True, slots=True)
class Announced:
    """Staged sender to receiver: the next value is this long."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ChunksEnqueued:
    """Staged sender to receiver: so many more chunks are on their way into the host's memory."""

    num_chunks: int


@dataclass(frozen=True, slots=True)
class ChunksFreeEnqueued:
    """Staged receiver to sender: the ``free`` of so many more chunks is enqueued."""

    num_chunks: int


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

_ENQUEUED = struct.Struct("<BIIQ")
_FREE = struct.Struct("<BII")
_WANTED = struct.Struct("<BQ")
_OFFER = struct.Struct("<BIIIQH")
_RETIRED = struct.Struct("<BIQ")
_CHUNKS = struct.Struct("<BI")
_REFUSED = struct.Struct("<BQB")
_REASON_BYTES = 90


def pack(record: Record) -> bytes:
    """A record as bytes: at most 100 of them."""
    match record:
        case Enqueued(generation, slot, size_bytes):
            return _ENQUEUED.pack(0, generation, slot, size_bytes)
        case FreeEnqueued(generation, slot):
            return _FREE.pack(1, generation, slot)
        case Wanted(size_bytes):
            return _WANTED.pack(2, size_bytes)
        case Offer(generation, group, num_slots, slot_bytes, handle):
            return _OFFER.pack(3, generation, group, num_slots, slot_bytes, len(handle)) + handle
        case Retired(generation, num_values):
            return _RETIRED.pack(4, generation, num_values)
        case Announced(size_bytes):
            return _WANTED.pack(5, size_bytes)
        case ChunksEnqueued(num_chunks):
            return _CHUNKS.pack(6, num_chunks)
        case ChunksFreeEnqueued(num_chunks):
            return _CHUNKS.pack(7, num_chunks)
        case Finished():
            return b"\x08"
        case Refused(size_bytes, reason):
            text = reason.encode()[:_REASON_BYTES]
            return _REFUSED.pack(9, size_bytes, len(text)) + text


def unpack(data: bytes) -> Record:
    """The record that `pack` made bytes of. Raises a `ChannelError` for bytes of no record."""
    try:
        match data[0]:
            case 0:
                return Enqueued(*_ENQUEUED.unpack(data)[1:])
            case 1:
                return FreeEnqueued(*_FREE.unpack(data)[1:])
            case 2:
                return Wanted(*_WANTED.unpack(data)[1:])
            case 3:
                _, generation, group, num_slots, slot_bytes, length = _OFFER.unpack_from(data)
                handle = data[_OFFER.size :]
                if len(handle) == length:
                    return Offer(generation, group, num_slots, slot_bytes, handle)
            case 4:
                return Retired(*_RETIRED.unpack(data)[1:])
            case 5:
                return Announced(*_WANTED.unpack(data)[1:])
            case 6:
                return ChunksEnqueued(*_CHUNKS.unpack(data)[1:])
            case 7:
                return ChunksFreeEnqueued(*_CHUNKS.unpack(data)[1:])
            case 8 if len(data) == 1:
                return Finished()
            case 9:
                _, size_bytes, length = _REFUSED.unpack_from(data)
                text = data[_REFUSED.size :]
                if len(text) == length:
                    return Refused(size_bytes, text.decode(errors="ignore"))
    except (IndexError, struct.error):
        pass
    raise ChannelError(f"{len(data)} bytes are not a record of a device ring")
