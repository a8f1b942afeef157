"""Frames: messages on a stream of bytes, each with a proof that a holder of the key has sent it. Bytes in, messages out; no I/O.

::

    0          8         12         28                  28 + length
    ┌──────────┬─────────┬──────────┬─────────────────────┬──────────┐
    │ length   │ number  │ proof of │ payload             │ proof of │
    │          │ of fds  │ the head │                     │ all      │
    └──────────┴─────────┴──────────┴─────────────────────┴──────────┘

A proof is a keyed BLAKE2b of 16 bytes over who sends (so a frame that is sent back is none), the frame's number (so one that is
repeated, left out or out of turn is none), the length, the number of descriptors and, for the second proof, the payload. The
head is proved by itself: a length that nobody with the key has written is refused when 28 bytes are there, and nobody waits
for the rest. Payloads take memory as they arrive, and nothing of a frame is handed on before both proofs are checked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Any, Literal, NamedTuple

Role = Literal["driver", "actor"]
"""The two sides of a connection."""

KEY_BYTES = 32
HEAD_BYTES = 28
MAX_PAYLOAD_BYTES = 1 << 36
"""64 GiB: far above what anybody sends, and far below what overflows."""
MAX_FDS = 4096
"""Descriptors of one frame."""

_SIZES = struct.Struct("<QI")
_NUMBER = struct.Struct("<Q")
_MAC_BYTES = 16
_PEER: dict[Role, Role] = {"driver": "actor", "actor": "driver"}


class FrameError(ConnectionError):
    """What arrived was not sent by a holder of the key, or not in this order. The connection is over."""


class Frame(NamedTuple):
    """A message."""

    payload: bytes
    num_fds: int  # how many descriptors belong to it


def new_key() -> bytes:
    """A fresh random key."""
    return os.urandom(KEY_BYTES)


def check_size(size_bytes: int, num_fds: int) -> None:
    """Refuses a message that is too large for one frame (ValueError)."""
    if size_bytes > MAX_PAYLOAD_BYTES or num_fds > MAX_FDS:
        raise ValueError(
            f"a message of {size_bytes} bytes and {num_fds} descriptors is too large: "
            f"the most are {MAX_PAYLOAD_BYTES} and {MAX_FDS}"
        )


def _proofs_of(key: bytes, sender: Role) -> Any:
    """What the proofs of one direction start from."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, and not {len(key)}")
    return hashlib.blake2b(key=key, digest_size=_MAC_BYTES, person=sender.encode())


class Sealer:
    """Makes the frames that one side sends."""

    def __init__(self, key: bytes, role: Role) -> None:
        self._start = _proofs_of(key, role)
        self.number = 0  # the next frame's number. The sender counts it up once the frame is on its way.

    def seal(self, payload: bytes, num_fds: int = 0) -> tuple[bytes, bytes]:
        """What goes before the payload and what goes after it."""
        check_size(len(payload), num_fds)
        sizes = _SIZES.pack(len(payload), num_fds)
        proof = self._start.copy()
        proof.update(_NUMBER.pack(self.number) + sizes)
        head = sizes + proof.digest()
        proof.update(payload)
        return head, proof.digest()


class Opener:
    """Takes apart what the other side has sent."""

    def __init__(self, key: bytes, role: Role) -> None:
        self._start = _proofs_of(key, _PEER[role])
        self._number = 0
        self._head = bytearray()
        self._proof: Any = None  # of the frame whose payload is arriving; None before its head is whole
        self._parts: list[bytes] = []
        self._num_parts = 0  # parts beyond these are from a copy that was discarded
        self._num_missing = 0  # bytes of the payload
        self._tail = bytearray()
        self._num_fds = 0  # that the frame says it has
        self._num_fds_here = 0  # that came with it
        self.error: FrameError | None = None  # why nothing is taken any more; None as long as all is well

    def copy(self) -> Opener:
        """Returns a copy with the same state: an interrupted caller discards the copy and continues with the original."""
        twin = Opener.__new__(Opener)
        twin.__dict__.update(self.__dict__)
        twin._head, twin._tail = bytearray(self._head), bytearray(self._tail)
        twin._proof = self._proof and self._proof.copy()
        return twin  # the list of parts is shared: the parts may take gigabytes

    def take(self, data: bytes, num_fds: int = 0) -> list[Frame]:
        """The frames that are whole with this piece of the stream, which is cut anywhere. Those before an error are good.

        The ``num_fds`` descriptors that came with it belong to the frame of the last byte: what is received ends where descriptors
        were sent (unix(7)).
        """
        frames: list[Frame] = []
        if self.error is None:
            try:
                self._take(memoryview(data), num_fds, frames)
            except FrameError as error:
                self.error = error
                self._parts = []
        return frames

    def _take(self, data: memoryview, num_fds: int, frames: list[Frame]) -> None:
        at, end = 0, len(data)
        del self._parts[self._num_parts :]
        while at < end:
            if self._proof is None:
                at += self._fill(self._head, HEAD_BYTES, data[at:])
                if len(self._head) == HEAD_BYTES:
                    self._open_head()
            elif self._num_missing:
                piece = data[at : at + self._num_missing]
                self._proof.update(piece)
                self._parts.append(bytes(piece))
                self._num_parts += 1
                self._num_missing -= len(piece)
                at += len(piece)
            else:
                at += self._fill(self._tail, _MAC_BYTES, data[at:])
            if at == end:
                self._num_fds_here += num_fds
            if len(self._tail) == _MAC_BYTES:
                frames.append(self._close_frame())
        if self._num_fds_here > (MAX_FDS if self._proof is None else self._num_fds):
            raise FrameError(f"{self._num_fds_here} descriptors came with a message that has {self._num_fds}")

    @staticmethod
    def _fill(part: bytearray, size_bytes: int, data: memoryview) -> int:
        """Moves what is missing of a part of fixed size; how much that was."""
        piece = data[: size_bytes - len(part)]
        part += piece
        return len(piece)

    def _open_head(self) -> None:
        sizes = bytes(self._head[: _SIZES.size])
        proof = self._start.copy()
        proof.update(_NUMBER.pack(self._number) + sizes)
        if not hmac.compare_digest(proof.digest(), self._head[_SIZES.size :]):
            raise FrameError(f"message {self._number} does not begin like one from a holder of the key")
        self._num_missing, self._num_fds = _SIZES.unpack(sizes)
        if self._num_missing > MAX_PAYLOAD_BYTES or self._num_fds > MAX_FDS:
            raise FrameError(
                f"message {self._number} says that it has {self._num_missing} bytes, {self._num_fds} descriptors"
            )
        self._proof = proof
        self._head.clear()

    def _close_frame(self) -> Frame:
        if not hmac.compare_digest(self._proof.digest(), self._tail):
            raise FrameError(f"message {self._number} is not what a holder of the key has sent")
        if self._num_fds_here != self._num_fds:
            raise FrameError(
                f"message {self._number} has {self._num_fds} descriptors, and {self._num_fds_here} came with it"
            )
        frame = Frame(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts), self._num_fds)
        self._number += 1
        self._proof, self._parts, self._num_parts = None, [], 0
        self._num_fds_here, self._num_fds = 0, 0
        self._tail.clear()
        return frame
