"""A wire: one TCP connection between two processes of different hosts, for all channels between them (`channels.tcp`).

Any thread may move bytes, one at a time; nobody waits for that one. The party does it itself while it looks for work, and its
doorbell wakes it when something comes while it sleeps. A thread does it while the party runs a method, or something is left to be
sent (`channels.wires`).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from crossfade.channels.landing import Landing
from crossfade.channels.wire_frames import END, HEAD, KIND_BITS, REFUSED, TOKENS, Incoming, Sender
from crossfade.errors import SessionError
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.tcp import Stream

_MOST_PARTS: Final = 64
"""Parts that one system call sends; the kernel takes 1024."""
_ATTENDED_NS: Final = 1_200_000
"""Who has looked so lately is going to look again."""
_MOMENT_NS: Final = 50_000
"""Who has looked so lately, and found nothing, looks later."""
_LOOKS: Final = 6
"""So often in a row a look asks whether something has come, some microseconds long."""

_COPIED_PER_S: Final = 1.5e9
"""Bytes that are copied into new memory in a second."""


class Wire:
    """One end of a connection, which may come later. ``doorbell`` and ``bell`` are this party's, ``peer`` is the party at the other
    end, and ``where`` its host.
    """

    def __init__(self, bell: Bell, doorbell: Doorbell | None, peer: str, where: str = "") -> None:
        self.fault = ""  # why nothing moves any more
        self._label = f"{peer} on {where}" if where else peer
        self.peer = peer
        self._stream: Stream | None = None
        self._socket: socket.socket | None = None  # once there is a connection; until then what is sent waits
        self._bell = bell
        self._doorbell = doorbell
        self._poll: Callable[[int], object] | None = None  # whether something has come, within milliseconds
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.owes = False  # whether tokens may be due
        self._writers: dict[int, Sender] = {}
        self._landings: dict[int, Landing] = {}
        self._only_landing: Landing | None = None  # the only one, if that is counted
        self._uncounted: list[Landing] = []  # those whose rings are to be asked for what was given back
        self._unsent: deque[bytes | memoryview] = deque()
        self._incoming = Incoming(self._writers, self._landings)
        self._attended_ns = self._looked_ns = 0
        self._has_come = False  # whether a look has seen something that was not received yet
        self.num_bytes_sent = 0
        self.num_received = 0  # how often something had come
        self.wants_room: Callable[[], None] = _nothing  # called when something is left to be sent

    def connect(self, stream: Stream) -> None:
        """The connection is there. Any thread may call it, once."""
        stream.socket.setblocking(False)
        with self._receiving, self._sending:
            if self.fault:
                stream.close()
                return
            self._stream, self._socket = stream, stream.socket
            poller = select.poll()
            poller.register(stream.socket, select.POLLIN)
            self._poll = poller.poll
        if self._doorbell is not None:
            with suppress(SessionError):  # it was closed meanwhile
                self._doorbell.watch(self.fileno(), self._readable)
        self.wants_room()

    def _readable(self) -> None:
        if not self.pump():
            time.sleep(0)  # another thread moves its bytes

    def add_writer(self, channel: int, writer: Sender) -> None:
        self._writers[channel] = writer

    def add_landing(self, channel: int, landing: Landing) -> None:
        self._landings[channel] = landing
        if not landing.is_counted:
            self._uncounted.append(landing)
        self._only_landing = landing if landing.is_counted and len(self._landings) == 1 else None

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    # Sending

    @property
    def has_unsent(self) -> bool:
        """Whether something that was accepted is still in this process's memory."""
        return bool(self._unsent)

    def send(self, channel: int, kind: int, parts: Sequence[bytes | memoryview], size: int) -> None:
        """Sends a value, or queues what the connection does not take now. Errors show in ``fault``."""
        with self._sending:
            self._queue([self._tokens() + HEAD.pack(channel, kind, size), *parts])
            self._flush()
            if self._unsent:
                self._keep_rest()

    def send_small(self, channel: int, kind: int, payload: bytes) -> None:
        """`send` for a value that is better copied than sent in parts; in most cases that is one system call."""
        with self._sending:
            tokens = b""
            if self.owes:
                only = self._only_landing
                if only is None or only.is_refused:
                    tokens = self._tokens()
                else:  # they go along in the value's own head
                    self.owes = False
                    num = only.num_read
                    kind |= (num - only.num_returned) << KIND_BITS
                    only.num_returned = num
            frame = tokens + HEAD.pack(channel, kind, len(payload)) + payload
            if not self._unsent and self._socket is not None and not self.fault:
                try:
                    num_sent = self._socket.send(frame)
                except OSError:  # the flush meets it again
                    num_sent = 0
                self.num_bytes_sent += num_sent
                if num_sent == len(frame):
                    return
                frame = frame[num_sent:]
            self._queue([frame])
            self._flush()

    def _keep_rest(self) -> None:
        """Sends what is left of values that their owner may change, as long as a copy would take; then copies the rest (CH-1)."""
        left_bytes = sum(len(part) for part in self._unsent if _may_change(part))
        if left_bytes and self._socket is not None:
            deadline = time.monotonic() + left_bytes / _COPIED_PER_S
            poller = select.poll()
            poller.register(self._socket, select.POLLOUT)
            while self._unsent and not self.fault and (left_s := deadline - time.monotonic()) > 0:
                poller.poll(1000 * left_s)
                self._flush()
        for place, part in enumerate(self._unsent):
            if _may_change(part):
                self._unsent[place] = bytes(part)

    def send_end(self, channel: int) -> None:
        """Says that no more values of a channel come."""
        with self._sending:
            self._queue([HEAD.pack(channel, END, 0)])
            self._flush()

    def _queue(self, parts: Iterable[bytes | memoryview]) -> None:
        if not self.fault:
            self._unsent.extend(parts)

    def _queue_tokens(self, *, only_due: bool) -> None:
        if frames := self._tokens(only_due=only_due):
            self._queue([frames])

    def _tokens(self, *, only_due: bool = False) -> bytes:
        """The frames for the tokens that are to be given back."""
        frames = b""
        if not self.owes:
            return frames
        self.owes = False  # before looking: another thread may say so again meanwhile
        for channel, landing in self._landings.items():
            num = landing.num_due
            if num and (not only_due or num >= landing.most_due):
                frames += HEAD.pack(channel, TOKENS, num)
                landing.num_returned += num
            elif num:
                self.owes = True
            if landing.is_refused:
                frames += HEAD.pack(channel, REFUSED, 0)
                landing.is_refused = False
        return frames

    def _flush(self) -> bool:
        """Sends what it can. Returns whether it was anything."""
        has_sent = False
        try:
            while self._unsent and self._socket is not None:
                if len(self._unsent) == 1:
                    num_sent = self._socket.send(self._unsent[0])
                else:
                    num_sent = self._socket.sendmsg(list(islice(self._unsent, _MOST_PARTS)))
                self.num_bytes_sent += num_sent
                has_sent = True
                self._drop(num_sent)
        except (BlockingIOError, InterruptedError):
            self.wants_room()
        except OSError as error:
            self._break(str(error))
        return has_sent

    def _drop(self, num_sent: int) -> None:
        while self._unsent and num_sent >= len(first := self._unsent[0]):
            num_sent -= len(first)
            self._unsent.popleft()
        if num_sent:
            self._unsent[0] = memoryview(self._unsent[0])[num_sent:]

    # Receiving

    def attend(self, asking: Landing | None = None) -> bool:
        """`pump` by a thread that waits for a value and will look again. It does nothing where the last look is a moment ago, found
        nothing, and nothing may have to be sent.
        """
        now_ns = time.monotonic_ns()
        self._attended_ns = now_ns
        if self._has_come or self.owes or self._unsent or self._uncounted or now_ns - self._looked_ns > _MOMENT_NS:
            return self.pump(asking)
        return False

    def look(self, nap_ms: int = 0) -> bool:
        """Whether something has come, which `attend` then takes in, by a thread that waits for a value and will look again. It
        looks for some microseconds, or sleeps up to ``nap_ms``.
        """
        self._attended_ns = self._looked_ns = time.monotonic_ns()
        poll = self._poll
        if poll is not None and not self.fault:
            try:
                for _ in range(1 if nap_ms else _LOOKS):
                    if poll(nap_ms):
                        self._has_come = True
                        return True
                if not (self.owes or self._unsent or self._uncounted):
                    return False
            except RuntimeError:  # another thread is in it
                pass
        before = self.num_received
        self.pump()
        return self.num_received != before

    @property
    def lands_for_others(self) -> bool:
        """Whether something comes here that others on this host read."""
        return bool(self._uncounted)

    @property
    def is_attended(self) -> bool:
        """Whether the party looks for work, or sleeps and is woken when something comes."""
        is_woken = self._doorbell is not None and self._bell.flags[0]
        return bool(is_woken) or time.monotonic_ns() - self._attended_ns < _ATTENDED_NS

    def pump(self, asking: Landing | None = None) -> bool:
        """Moves what can be moved now, unless another thread is at it. Returns whether that was anything. A short value for the
        landing of the only reader that is ``asking`` for one goes to it, and not through the ring.
        """
        if not self._receiving.acquire(False):
            return False
        incoming = self._incoming
        try:
            self._has_come = False
            incoming.asking = asking if asking is not None and asking.has_nothing() else None
            has_moved = self._socket is not None and not self.fault and incoming.receive(self._socket)
            self.num_received += has_moved
            if incoming.fault:
                self._break(incoming.fault)
            for landing in self._uncounted:
                if landing.collect():
                    self.owes = True
        finally:
            incoming.asking = None
            self._receiving.release()
        if not (self.owes or self._unsent):
            return has_moved
        with self._sending:
            self._queue_tokens(only_due=False)
            return self._flush() or has_moved

    def give_back(self, landing: Landing) -> None:
        """A value was read at a landing: its token goes back with the next value, unless the writer may need it before."""
        if not landing.is_counted:
            if not self._receiving.acquire(blocking=False):
                return  # who is at it will find it
            try:
                if landing.collect():
                    self.owes = True
            finally:
                self._receiving.release()
        if landing.num_due >= landing.most_due:
            with self._sending:
                self._queue_tokens(only_due=True)
                self._flush()

    # Ending

    def _break(self, reason: str) -> None:
        if not self.fault:
            self.fault = f"the connection to {self._label} is lost: {reason}"
            for landing in self._landings.values():
                landing.end()
            self._unwatch()
            self._bell.ring_if_asleep()

    def _unwatch(self) -> None:
        if self._doorbell is not None and self._socket is not None:
            self._doorbell.unwatch(self.fileno())

    def break_off(self, reason: str) -> None:
        """The other side is gone."""
        with self._receiving:
            self._break(reason)

    def close_landing(self, landing: Landing) -> None:
        """This side does not read any more."""
        with self._receiving:
            landing.end()

    def close(self) -> None:
        """Ends it; what was accepted and not sent is lost."""
        if self._stream is not None:
            self._stream.end()
        with self._receiving, self._sending:
            self.fault = self.fault or "it was closed by this side"
            self._unsent.clear()
            self._incoming.drop()
            for landing in self._landings.values():
                landing.end()
            self._unwatch()
            if self._stream is not None:
                self._stream.close()


def _may_change(part: bytes | memoryview) -> bool:
    return isinstance(part, memoryview) and not part.readonly


def _nothing() -> None:
    pass
