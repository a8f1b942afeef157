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
from crossfade.host.frames import FrameError, Opener, Role, Sealer, check_size
from crossfade.host.limits import limit_met
from crossfade.interrupted import passed_through_others, pause

_MAX_FDS_A_CALL = 250  # the kernel takes 253
_CHUNK_BYTES = 1 << 18
_RECEIVING = ((_CHUNK_BYTES,), (socket.CMSG_SPACE(_MAX_FDS_A_CALL * 4),), (socket.MSG_CMSG_CLOEXEC,))


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What arrived."""

    payload: bytes
    fds: tuple[int, ...]  # descriptors, owned by the receiver


def hand_over(secret: bytes) -> int:
    """A descriptor for another process to inherit, from which the secret (up to 4096 bytes) can be read once: a pipe."""
    reading, writing = os.pipe()
    try:
        os.write(writing, secret)
    finally:
        os.close(writing)
    return reading


def take_over(fd: int, num_bytes: int) -> bytes:
    """The secret behind an inherited descriptor, which is closed. Raises a ConnectionError if it is not there."""
    secret = b""
    try:
        while len(secret) < num_bytes and (more := os.read(fd, num_bytes - len(secret))):
            secret += more
    finally:
        os.close(fd)
    if len(secret) != num_bytes:
        raise ConnectionError(f"{num_bytes} bytes of key were expected, and {len(secret)} came")
    return secret


class _Outgoing:
    __slots__ = ("fds", "number", "parts", "payload", "sent")

    def __init__(self, payload: bytes, fds: list[int]) -> None:
        self.payload = payload
        self.fds = fds  # descriptors to send with it, owned by this object
        self.parts: tuple[memoryview, ...] = ()  # the frame's bytes, in order; empty until the frame is sealed
        self.number = 0
        self.sent: list[int] = []  # counts of bytes that were sent; their sum says how far the frame was sent

    def rest(self) -> memoryview:
        """Returns the bytes to send next, empty after the last. If descriptors go along, the first bytes are sent one at a time."""
        at = sum(self.sent)
        self.sent[:] = (at,)
        if at * _MAX_FDS_A_CALL < len(self.fds):
            return self.parts[0][at : at + 1]
        for part in self.parts:
            if at < len(part):
                return part[at : at + _CHUNK_BYTES]
            at -= len(part)
        return self.parts[0][:0]


class Connection:
    """One end of a connection. Sending and receiving may happen in different threads. It owns the socket; both sides have the key.

    A signal's handler may raise at any point: a posted message is still sent, whole and once, and a message that has arrived is
    still taken in. Progress is noted in the same interpreter step that makes it, and the next caller continues from there.
    """

    def __init__(self, sock: socket.socket, key: bytes, role: Role) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sealer = Sealer(key, role)
        self._opener = Opener(key, role)
        self._fds: deque[int] = deque()
        self._inbox: deque[Message] = deque()
        # Both reentrant: a signal's handler may come where its own thread has one. It must not wait for that, nor continue
        # with what its thread was in the middle of.
        self._send_lock = threading.RLock()
        self._flusher = 0  # the thread that is in `flush`
        self._senders: set[int] = set()  # the threads that are in `send`
        self._outgoing: deque[_Outgoing] = deque()  # of the first message, a part may already be sent
        self._receive_lock = threading.RLock()
        self._receiver = 0  # the thread that takes in
        self._arrived: deque[Any] = deque()  # results of `recvmsg` that are not taken in yet
        self._fresh: deque[Message | None] = deque()  # messages that are not in the inbox yet, and then None
        # the other side has closed, or this side has; messages that had arrived can still be taken.
        self.is_closed = False

    @staticmethod
    def pair(key: bytes) -> tuple[Connection, socket.socket]:
        """The driver's end of a connection, and the socket for the actor to inherit."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Connection(mine, key, "driver"), theirs

    def fileno(self) -> int:
        """The descriptor, for waiting."""
        return self._socket.fileno()

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Posts a message, and waits until it is sent. While it waits for room, it takes in what the other side sends, so two sides
        that send to each other at the same time do not block each other. If the wait is interrupted, `flush` sends the rest.

        Raises a ConnectionError if the other side has closed (a FrameError if it is not who it should be), a ValueError if the
        message is too large, and a `SessionError` in a signal's handler that interrupted its own thread while that was sending or
        taking in here.
        """
        self.refuse_to_wait()
        me = threading.get_ident()
        try:
            self._senders.add(me)
            self.post(payload, fds)
            while not self.flush():
                self._await_room()
        finally:
            self._senders.discard(me)

    def post(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Queues a message behind all earlier ones, for the next `flush` to send. Never blocks. The descriptors are duplicated."""
        if self.is_closed:
            self._raise_refusal()
            raise BrokenPipeError("the connection is closed")
        check_size(len(payload), len(fds))
        self._outgoing.append(_Outgoing(payload, _duplicates(fds)))

    def flush(self) -> bool:
        """Sends the posted messages as far as there is room. False if there is not enough room, or if the caller is a signal's
        handler that interrupted its own thread in this method.
        """
        with self._send_lock:
            if self._flusher:
                return False
            self._flusher = threading.get_ident()
            try:
                while self._outgoing and self._send_one(self._outgoing[0]):
                    if self._outgoing:  # else a signal's handler has closed this just now
                        self._outgoing.popleft()
            except OSError as error:
                if not passed_through_others(error):
                    self._drop_refused(error)
                raise
            finally:
                self._flusher = 0
            return not self._outgoing

    @property
    def has_unsent(self) -> bool:
        """Whether any posted message is not sent completely."""
        return bool(self._outgoing)

    def refuse_to_wait(self) -> None:
        """Raises a `SessionError` where nothing would come: in a signal's handler whose own thread sends or takes in here."""
        me = threading.get_ident()
        if me in self._senders or me in (self._flusher, self._receiver):
            raise in_the_middle("sending to the same actor, or of taking in what it has sent")

    def _send_one(self, message: _Outgoing) -> bool:
        """Sends the rest of a message; False if there is not enough room. May be called again after an interrupt at any point."""
        if not message.parts:
            head, tail = self._sealer.seal(message.payload, len(message.fds))
            size_bytes = len(head) + len(message.payload) + len(tail)
            parts = (
                (head, message.payload, tail)
                if size_bytes > _CHUNK_BYTES
                else (b"".join((head, message.payload, tail)),)
            )
            message.number = self._sealer.number
            message.parts = tuple(map(memoryview, parts))
        while rest := message.rest():
            try:
                self._send_some(message, rest)
            except BlockingIOError:
                return False
        self._sealer.number = message.number + 1
        _close_all(message.fds)
        return True

    def _send_some(self, message: _Outgoing, data: memoryview) -> None:
        start = message.sent[0] * _MAX_FDS_A_CALL
        fds = array.array("i", message.fds[start : start + _MAX_FDS_A_CALL])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        # Handlers run between two interpreter steps. Sending and noting the count are one step, so no count is lost.
        message.sent.extend(map(self._socket.sendmsg, ([data],), (ancillary,)))

    def _drop_refused(self, error: OSError) -> None:
        """Drops the first message if it met a limit of the system, before any of it was sent; else drops all messages."""
        if limit_met(error) is not None and not sum(self._outgoing[0].sent):
            _close_all(self._outgoing.popleft().fds)
        else:
            self._drop_outgoing()

    def _drop_outgoing(self) -> None:
        while self._outgoing:
            _close_all(self._outgoing[0].fds)
            if self._outgoing:  # as in `flush`
                self._outgoing.popleft()

    def _await_room(self) -> None:
        if self.is_closed:
            raise BrokenPipeError("the connection is closed")
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | select.POLLOUT)
        if any(event & select.POLLIN for _, event in pause(poller.poll)):
            self._receive()

    def take(self) -> Message | None:
        """The next message, if it has arrived whole. Never blocks. A `FrameError` if its sender does not hold the key."""
        self._fill()
        try:
            return self._inbox.popleft()
        except IndexError:
            self._raise_refusal()
            return None

    def peek(self) -> Message | None:
        """Returns the next message as `take` does, but keeps it until `drop`, so that an interrupted caller gets it again."""
        self._fill()
        try:
            return self._inbox[0]
        except IndexError:
            self._raise_refusal()
            return None

    def _fill(self) -> None:
        if not self._inbox and not self.is_closed:
            self._receive()

    def drop(self, message: Message) -> None:
        """Removes a message that `peek` returned. Does nothing if a signal's handler has removed it meanwhile."""
        with suppress(ValueError):
            self._inbox.remove(message)

    def _raise_refusal(self) -> None:
        if self._opener.error is not None:  # a new object: one error raised twice would collect tracebacks
            raise FrameError(str(self._opener.error))

    @property
    def has_message(self) -> bool:
        """Whether something was received, by a send that had to wait or was interrupted, that nobody took: no descriptor tells."""
        return bool(self._inbox or self._fresh or self._arrived)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until something may have arrived, for at most ``timeout_s`` seconds."""
        if not self._inbox and not self.is_closed:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            pause(poller.poll, None if timeout_s is None else timeout_s * 1000)

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
        self._hand_over()
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
        """Takes in the result of one `recvmsg`, completely or, if interrupted, not at all."""
        opener, fds, nothing = self._opener.copy(), self._fds.copy(), deque[Any]()
        received = descriptors(ancillary)
        fds.extend(received)
        frames = opener.take(data, len(received))
        fresh = deque[Message | None](
            Message(frame.payload, tuple(fds.popleft() for _ in range(frame.num_fds))) for frame in frames
        )
        fresh.append(None)
        if flags & socket.MSG_CTRUNC and opener.error is None:
            opener.error = FrameError("descriptors were lost: the limit of open files may be reached")
        is_end = not data or opener.error is not None
        if self.is_closed:  # a signal's handler closed it meanwhile, with everything that was here before
            self._arrived = nothing
            _close_all(received)
            return
        # These lines call nothing, so no handler can run between them.
        self._opener = opener
        self._fds = fds
        self._fresh = fresh
        self._arrived = nothing
        self._hand_over()
        if is_end:
            self._end()

    def _hand_over(self) -> None:
        """Moves the messages that were taken in to the inbox, in one interpreter step."""
        if self._fresh:
            self._inbox.extend(iter(self._fresh.popleft, None))

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
            self._hand_over()
            while self._inbox:
                for fd in self._inbox.popleft().fds:
                    os.close(fd)
        with self._send_lock:
            self._drop_outgoing()


def in_the_middle(doing: str) -> SessionError:
    """Of a signal's handler that has come where its own thread would have to continue first."""
    return SessionError(
        f"a signal's handler has come in the middle of {doing}",
        hint="let the handler take a note, and do it afterwards",
    )


def _duplicates(fds: Sequence[int]) -> list[int]:
    made: list[int] = []
    try:
        made.extend(map(os.dup, fds))  # one interpreter step: no handler can run inside it
    except OSError:
        _close_all(made)
        raise
    return made


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with what `socket.recvmsg` has received. They are the caller's."""
    received = array.array("i")
    for level, kind, raw in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(raw[: len(raw) - len(raw) % 4])
    return list(received)
