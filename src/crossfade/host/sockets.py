"""Messages with descriptors over a pair of connected UNIX sockets.

The pair is made before the other process starts and inherited by it: there is no address that a stranger could connect
to. Every message is a frame (host/frames.py) that proves that a holder of the connection's key has sent it, so what else comes to
be written to the descriptor is never taken for a message.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from crossfade.errors import SessionError
from crossfade.host.frames import FrameError, Opener, Role, Sealer
from crossfade.interrupted import passed_through_others

__all__ = ["Connection", "Message", "hand_over", "take_over"]

_MAX_FDS_A_CALL = 250  # the kernel takes 253
_CHUNK_BYTES = 1 << 18
_RECEIVING = ((_CHUNK_BYTES,), (socket.CMSG_SPACE(_MAX_FDS_A_CALL * 4),), (socket.MSG_CMSG_CLOEXEC,))
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


def hand_over(secret: bytes) -> int:
    """A descriptor for another process to inherit, from which the secret (up to 4096 bytes) can be read once: a pipe."""
    reading, writing = os.pipe()
    try:
        os.write(writing, secret)
    finally:
        os.close(writing)
    return reading


def take_over(fd: int, num_bytes: int) -> bytes:
    """The secret behind an inherited descriptor, which is closed.

    Raises:
        ConnectionError: it is not there.
    """
    secret = b""
    try:
        while len(secret) < num_bytes and (more := os.read(fd, num_bytes - len(secret))):
            secret += more
    finally:
        os.close(fd)
    if len(secret) != num_bytes:
        raise ConnectionError(f"{num_bytes} bytes of key were expected, and {len(secret)} came")
    return secret


class Connection:
    """One end. Sending and receiving may happen in different threads.

    Args:
        sock: the socket, owned by this object from now on.
        key: the connection's key (``frames.new_key``), which the other side has too.
        role: which side this is.

    Attributes:
        is_closed: the other side is gone (or this one closed it); what had arrived can still be taken.
    """

    def __init__(self, sock: socket.socket, key: bytes, role: Role) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sealer = Sealer(key, role)
        self._opener = Opener(key, role)
        self._fds: deque[int] = deque()
        self._inbox: deque[Message] = deque()
        # Both reentrant: a signal's handler may come where its own thread has one. It must not wait for that, nor go on with what
        # its thread was in the middle of.
        self._send_lock = threading.RLock()
        self._sender = 0  # the thread that sends
        self._postponed: deque[bytes] = deque()
        self._receive_lock = threading.RLock()
        self._receiver = 0  # the thread that takes in
        self._arrived: deque[Any] = deque()  # what `recvmsg` has given and is not taken in
        self._sent: list[int] = []  # of the frame under way: what each call took of it
        self._frame = (0, 0)  # its number and length
        self.is_closed = False

    @staticmethod
    def pair(key: bytes) -> tuple[Connection, socket.socket]:
        """The driver's end of a connection, and the socket for the actor to inherit."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Connection(mine, key, "driver"), theirs

    def fileno(self) -> int:
        """The descriptor, for waiting."""
        return self._socket.fileno()

    def send(self, payload: bytes, fds: Sequence[int] = (), *, may_postpone: bool = False) -> bool:
        """Sends a message whole. While the other side does not take it, what it sends is taken in, so two sides that
        send to each other at once do not block each other.

        Args:
            payload: the message's bytes.
            fds: descriptors that go with it.
            may_postpone: in a signal's handler that has come while its thread sends another message here, have it sent after that.

        Returns:
            False if it was postponed.

        Raises:
            ConnectionError: the other side is gone (FrameError: or it is not who it should be).
            SessionError: this is such a handler.
            ValueError: the message is larger than any may be.
        """
        if self.is_closed:
            self._raise_refusal()
            raise BrokenPipeError("the connection is closed")
        with self._send_lock:
            if self._sender or self._receiver == threading.get_ident():
                if may_postpone and not fds:
                    self._postponed.append(payload)
                    return False
                raise in_the_middle("sending to the same actor, or of taking in what it has sent")
            self._sender = threading.get_ident()
            try:
                self._send(payload, fds)
                self._send_postponed()
            finally:
                self._sender = 0
        return True

    def flush(self) -> bool:
        """Sends what was postponed and is not sent yet. False if that cannot be, in a signal's handler.

        Raises:
            ConnectionError: the other side is gone.
        """
        with self._send_lock:
            if self._sender or self._receiver == threading.get_ident():
                return not self._postponed
            self._sender = threading.get_ident()
            try:
                self._send_postponed()
            finally:
                self._sender = 0
        return True

    def refuse_to_wait(self) -> None:
        """Raises a `SessionError` where nothing would come: in a signal's handler whose own thread sends or takes in here."""
        if threading.get_ident() in (self._sender, self._receiver):
            raise in_the_middle("sending to the same actor, or of taking in what it has sent")

    def _send_postponed(self) -> None:
        while self._postponed:
            self._send(self._postponed[0], ())
            self._postponed.popleft()

    def _send(self, payload: bytes, fds: Sequence[int]) -> None:
        self._settle()
        head, tail = self._sealer.seal(payload, len(fds))
        size_bytes = len(head) + len(payload) + len(tail)
        self._frame = (self._sealer.number, size_bytes)
        parts = (head, payload, tail) if size_bytes > _CHUNK_BYTES else (b"".join((head, payload, tail)),)
        try:
            self._send_parts([memoryview(part) for part in parts], fds)
        finally:
            self._settle()

    def _settle(self) -> None:
        """Counts the frame under way if all of it was sent. If only some was, the other side would take what follows for its
        rest: that is the end of the connection. (May be interrupted by Ctrl-C anywhere, and called again.)
        """
        number, size_bytes = self._frame
        num_sent = sum(self._sent)
        if num_sent and num_sent == size_bytes:
            self._sealer.number = number + 1
        elif num_sent:
            self.hang_up()
        self._sent = []

    def _send_parts(self, parts: Sequence[memoryview], fds: Sequence[int]) -> None:
        first, *others = parts
        for start in range(0, len(fds), _MAX_FDS_A_CALL):
            batch = array.array("i", fds[start : start + _MAX_FDS_A_CALL])
            first = first[self._send_some(first[:1], batch) :]
        for part in (first, *others):
            while part:
                part = part[self._send_some(part[:_CHUNK_BYTES]) :]

    def _send_some(self, data: memoryview, fds: array.array[int] = _FD) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        while True:
            try:
                # Ctrl-C comes between two steps of the interpreter, and this is one: what was sent is also noted.
                self._sent.extend(map(self._socket.sendmsg, ([data],), (ancillary,)))
                return self._sent[-1]
            except BlockingIOError:
                if self.is_closed:
                    raise BrokenPipeError("the connection is closed") from None
                poller = select.poll()
                poller.register(self._socket, select.POLLIN | select.POLLOUT)
                if any(event & select.POLLIN for _, event in poller.poll()):
                    self._receive()

    def take(self) -> Message | None:
        """The next message, if it has arrived whole. Never blocks.

        Raises:
            FrameError: what came after the messages that were taken was not sent by a holder of the key. Nothing more comes.
        """
        if not self._inbox and not self.is_closed:
            self._receive()
        try:
            return self._inbox.popleft()
        except IndexError:
            self._raise_refusal()
            return None

    def _raise_refusal(self) -> None:
        if self._opener.error is not None:  # a new object: one error raised twice would collect tracebacks
            raise FrameError(str(self._opener.error))

    @property
    def has_message(self) -> bool:
        """Whether something was received, by a send that had to wait or was interrupted, that nobody took: no descriptor tells."""
        return bool(self._inbox or self._arrived)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until something may have arrived, for at most ``timeout_s`` seconds."""
        if not self._inbox and not self.is_closed:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            poller.poll(None if timeout_s is None else timeout_s * 1000)

    def _receive(self) -> None:
        """Takes in all that is there."""
        with self._receive_lock:
            if self._receiver:
                raise in_the_middle("taking in what the same actor has sent")
            self._receiver = threading.get_ident()
            try:
                self._receive_all()
            finally:
                self._receiver = 0

    def _receive_all(self) -> None:
        while not self.is_closed:
            if not self._arrived:
                try:
                    # One step of the interpreter, as in `_send_some`: what an interrupt comes behind is noted, and not lost.
                    self._arrived.extend(map(self._socket.recvmsg, *_RECEIVING))
                except BlockingIOError:
                    return
                except OSError as error:
                    if passed_through_others(error):
                        raise
                    self._arrived.append((b"", [], 0, None))
            self._take_in(*self._arrived[0])
        if self._fds:  # closed meanwhile, by a signal's handler
            self._end()

    def _take_in(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]], flags: int, _: object) -> None:
        """Takes in what has arrived last. Interrupted in the middle of that, nothing more can be."""
        try:
            received = _descriptors(ancillary)
            self._fds.extend(received)
            for frame in self._opener.take(data, len(received)):
                fds = tuple(self._fds.popleft() for _ in range(frame.num_fds))
                self._inbox.append(Message(frame.payload, fds))
            if flags & socket.MSG_CTRUNC and self._opener.error is None:
                self._opener.error = FrameError("descriptors were lost: the limit of open files may be reached")
        except BaseException:
            self._opener.error = self._opener.error or FrameError("taking in a message was interrupted")
            raise
        finally:
            self._arrived.clear()
            if not data or self._opener.error is not None:
                self._end()

    def _end(self) -> None:
        """Nothing more is taken in; descriptors that belong to no message are closed."""
        self.is_closed = True
        if self._opener.error is not None:
            self.hang_up()  # also for a send that waits
        while self._fds:
            os.close(self._fds.popleft())

    def hang_up(self) -> None:
        """Ends the conversation without waiting for anything: a send in another thread fails, the other side takes what has
        arrived and then sees the end. The descriptor stays until `close`.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this end, and the descriptors in messages that nobody took; the other side sees it at once."""
        self.is_closed = True
        self._socket.close()
        with self._receive_lock:
            self._end()
            while self._inbox:
                for fd in self._inbox.popleft().fds:
                    os.close(fd)


def in_the_middle(doing: str) -> SessionError:
    """Of a signal's handler that has come where its own thread would have to go on first."""
    return SessionError(
        f"a signal's handler has come in the middle of {doing}",
        hint="let the handler take a note, and do it afterwards",
    )


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """All descriptors that came beside some bytes."""
    received = array.array("i")
    for level, kind, raw in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(raw[: len(raw) - len(raw) % 4])
    return list(received)
