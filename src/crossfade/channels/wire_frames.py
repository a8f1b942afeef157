"""What goes over a wire (`channels.wire`): frames of a head and a payload.

::

    0         4        8                16
    ┌─────────┬────────┬────────────────┬─────────...
    │ channel │ kind   │ size in bytes, │ payload
    │         │        │ or a count     │
    └─────────┴────────┴────────────────┴─────────...

A payload is what lies in a slot of a ring, byte for byte, so that it is received where it stays; one system call sends a large
frame from the places where its parts lie. Frames that give tokens back, and that end a channel, have no payload. Where only one
channel goes the other way, a short value brings the tokens for it in its own head.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from crossfade.channels.landing import Landing
from crossfade.channels.ring_layout import INLINE_BYTES, SLOT_BYTES, SLOT_MESSAGE
from crossfade.channels.values.layout import Encoded

HEAD = struct.Struct("<IIQ")
TOKENS: Final = 100
END: Final = 101
REFUSED: Final = 102
"""Kinds that no record has."""
KIND_BITS: Final = 8
"""Of the head's word for the kind. What stands above them in a value's head are tokens for the only writer of the other side."""

_INBOX_BYTES: Final = 1 << 16
_MOST_CALLS: Final = 64
"""System calls of one look, so that one busy connection does not keep a thread from others."""
_GONE = "the connection was closed by the other side"


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


class Incoming:
    """The receiving half of a wire. One thread at a time uses it.

    Attributes:
        fault: why nothing more comes.
        asking: the landing whose only reader takes the next value at once, if that is short; the ring is empty.
    """

    def __init__(self, writers: Mapping[int, Sender], landings: Mapping[int, Landing]) -> None:
        self.fault = ""
        self.asking: Landing | None = None
        self._writers, self._landings = writers, landings
        self._inbox = memoryview(bytearray(_INBOX_BYTES))
        self._start = self._end = 0  # of what was received and not looked at
        self._target: memoryview | None = None  # where the rest of a value goes, while one is being received
        self._finish: Callable[[], None] = _nothing  # what is done once it has come whole

    def receive(self, connected: socket.socket) -> bool:
        """Takes what has come. Whether that was anything."""
        has_received = False
        for _ in range(_MOST_CALLS):
            try:
                if self._target is not None:
                    num = connected.recv_into(self._target)
                else:
                    num = connected.recv_into(self._inbox[self._end :] if self._end else self._inbox)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.fault = str(error)
                break
            if not num:
                self.fault = _GONE
                break
            has_received = True
            if self._target is not None:
                self._target = self._target[num:]
                if len(self._target):
                    continue
                self._target = self.asking = None
                self._finish()
            else:
                self._end += num
                is_full = self._end == len(self._inbox)
                is_between = self._take_frames()
                if is_between and not is_full:
                    break  # there is nothing more, or another look will find it
        return has_received

    def _take_frames(self) -> bool:
        """Takes what has come. Whether no value has come in part that is received where it stays."""
        inbox, start, end = self._inbox, self._start, self._end
        while end - start >= HEAD.size:
            channel, kind, size = HEAD.unpack_from(inbox, start)
            body = start + HEAD.size
            tokens = kind >> KIND_BITS
            kind &= (1 << KIND_BITS) - 1
            if kind < TOKENS:
                landing = self._landings[channel]
                if size <= INLINE_BYTES and kind != SLOT_BYTES and kind != SLOT_MESSAGE:
                    if end - body < size:
                        break
                    start = body + size
                    self._give(tokens)
                    if landing is self.asking:
                        self.asking = None
                        landing.come = kind, bytes(inbox[body:start])
                    else:
                        landing.stage(kind, bytes(inbox[body:start]))
                    continue
                self._start = start  # where there is no memory for it, this frame is looked at once more
                start = min(body + size, end)
                self.asking = None  # what comes behind this one passes the ring as well
                self._begin(landing, kind, size, inbox[body:start])
                self._give(tokens)
                if self._target is not None:
                    break
            elif kind == TOKENS:
                self._writers[channel].add_tokens(size)
                start = body
            elif kind == REFUSED:
                self._writers[channel].break_off("the other side closed it")
                start = body
            else:
                if ended := self._landings.get(channel):
                    ended.end()
                start = body
        if start == end:
            start = end = 0
        elif self._target is None and start:
            rest = bytes(inbox[start:end])
            inbox[: len(rest)] = rest
            start, end = 0, len(rest)
        self._start, self._end = start, end
        return self._target is None

    def _begin(self, landing: Landing, kind: int, size: int, here: memoryview) -> None:
        """A value for a slot has begun to come."""
        view, finish = landing.begin(kind, size)
        view[: len(here)] = here
        if len(here) == size:
            finish()
        else:
            self._target, self._finish = view[len(here) :], finish

    def _give(self, tokens: int) -> None:
        if tokens:
            next(iter(self._writers.values())).add_tokens(tokens)

    def drop(self) -> None:
        """What is being received goes nowhere any more."""
        self._target = None


def _nothing() -> None:
    pass
