"""Messages with descriptors over a pair of connected UNIX sockets.

The pair is made before the other process starts and inherited by it: there is no address that a stranger could connect
to, so whoever holds an end was given it. A message is 12 bytes (length, number of descriptors), then the payload.
"""

from __future__ import annotations

import array
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Connection", "Message"]

_HEADER = struct.Struct("<QI")
_MAX_FDS = 250  # the kernel takes 253 in one call
_CHUNK_BYTES = 1 << 18
_FD = array.array("i")


@dataclass(frozen=True, slots=True)
class Message:
    """What arrived.

    Attributes:
        payload: the bytes.
        fds: descriptors, owned by the receiver.
    """

    payload: bytes
    fds: tuple[int, ...]


class Connection:
    """One end. Sending and receiving may happen in different threads.

    Attributes:
        is_closed: the other side is gone (or this one closed it); what had arrived can still be taken.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._inbox: deque[Message] = deque()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self.is_closed = False

    @staticmethod
    def pair() -> tuple[Connection, socket.socket]:
        """A connection, and the socket for the other process to inherit."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Connection(mine), theirs

    def fileno(self) -> int:
        """The descriptor, for waiting."""
        return self._socket.fileno()

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Sends a message whole. While the other side does not take it, what it sends is taken in, so two sides that
        send to each other at once do not block each other.

        Raises:
            ConnectionError: the other side is gone.
        """
        if self.is_closed:
            raise BrokenPipeError("the connection is closed")
        data = memoryview(_HEADER.pack(len(payload), len(fds)) + payload)
        size_bytes = len(data)
        with self._send_lock:
            try:
                for start in range(0, len(fds), _MAX_FDS):
                    batch = array.array("i", fds[start : start + _MAX_FDS])
                    data = data[self._send_some(data[:1], batch) :]
                while data:
                    data = data[self._send_some(data[:_CHUNK_BYTES]) :]
            except BaseException:  # Ctrl-C while it waits
                if 0 < len(data) < size_bytes:
                    self.hang_up()  # what follows would be taken for the rest of this message
                raise

    def _send_some(self, data: memoryview, fds: array.array[int] = _FD) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        while True:
            try:
                return self._socket.sendmsg([data], ancillary)
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._socket, select.POLLIN | select.POLLOUT)
                if any(event & select.POLLIN for _, event in poller.poll()):
                    self._receive()

    def take(self) -> Message | None:
        """The next message, if it has arrived whole. Never blocks."""
        if not self._inbox and not self.is_closed:
            self._receive()
        try:
            return self._inbox.popleft()
        except IndexError:
            return None

    @property
    def has_message(self) -> bool:
        """Whether a message was taken in (by a send that had to wait) and nobody has taken it: no descriptor tells."""
        return bool(self._inbox)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until something may have arrived, for at most ``timeout_s`` seconds."""
        if not self._inbox and not self.is_closed:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            poller.poll(None if timeout_s is None else timeout_s * 1000)

    def _receive(self) -> None:
        """Takes in all that is there."""
        with self._receive_lock:
            while not self.is_closed:
                try:
                    data, ancillary, _, _ = self._socket.recvmsg(
                        _CHUNK_BYTES, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    return
                except (ConnectionError, OSError):
                    data, ancillary = b"", []
                for _, _, raw in ancillary:
                    received = array.array("i")
                    received.frombytes(raw[: len(raw) - len(raw) % 4])
                    self._fds.extend(received)
                if not data:
                    self.is_closed = True
                    return
                self._buffer += data
                self._split()

    def _split(self) -> None:
        """Moves whole messages from the buffer to the inbox."""
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            length, num_fds = _HEADER.unpack_from(self._buffer, start)
            body = start + _HEADER.size
            if len(self._buffer) - body < length:
                break
            fds = tuple(self._fds.popleft() for _ in range(num_fds))
            self._inbox.append(Message(bytes(self._buffer[body : body + length]), fds))
            start = body + length
        del self._buffer[:start]

    def hang_up(self) -> None:
        """Ends the conversation without waiting for anything: a send in another thread fails, the other side takes what has
        arrived and then sees the end. The descriptor stays until `close`.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this end; the other side sees it at once."""
        self.is_closed = True
        self._socket.close()
