"""What goes over a wire (`channels.wire`): frames of a head and a payload.

::

    0         4        8                16
    ┌─────────┬────────┬────────────────┬─────────...
    │ channel │ kind   │ size in bytes, │ payload
    │         │        │ or a count     │
    └─────────┴────────┴────────────────┴─────────...

A payload is what lies in a slot of a ring, byte for byte, so that it is received where it stays; one system call sends a large
frame from the places where its parts lie. Frames that give tokens back, and that end a channel, have no payload.
"""

from __future__ import annotations

import struct
from typing import Final, Protocol

from crossfade.channels.values.layout import Encoded

HEAD = struct.Struct("<IIQ")
TOKENS: Final = 100
END: Final = 101
REFUSED: Final = 102
"""Kinds that no record has."""


def padded(message: Encoded) -> list[bytes | memoryview]:
    """The parts of a message, and between them the bytes that lie between them in a slot."""
    parts: list[bytes | memoryview] = [message.head]
    at = len(message.head)
    for offset, data in message.buffers:
        if offset > at:
            parts.append(bytes(offset - at))
        if data.nbytes:
            parts.append(data)
        at = offset + data.nbytes
    return parts


class Sender(Protocol):
    """The writing end of a channel, as its wire knows it."""

    def add_tokens(self, number: int) -> None:
        """The landing gives tokens back."""

    def break_off(self, reason: str) -> None:
        """A reader does not read any more."""
