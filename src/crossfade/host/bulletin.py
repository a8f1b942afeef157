"""What processes of several hosts tell each other: each of them tells all others, who hear it in its order.

Between each two there is a connection of their own (`crossfade.host.tcp`), and in each of them a thread for each connection. A
*notice* has a topic; notices of a topic that nobody listens to yet wait. Small things go this way, by which they find each other
and agree.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from crossfade.host.tcp import Stream

_LENGTH = struct.Struct("<I")
_VALUES, _CLOSED = "values", "closed"
"""Topics of its own."""
_HAS_CLOSED = "it has closed its side"

Listener: TypeAlias = Callable[[str, bytes], None]
"""Is called with who has told, and what, in the thread of that one's connection."""


class Bulletin:
    """One party's side, at its host's ``address``. ``on_lost`` is called, with a peer that is lost before it closed."""

    def __init__(self, me: str, address: str, peers: Sequence[str]) -> None:
        self.me = me
        self.address = address
        self.peers = frozenset(peers)
        self.lost: dict[str, str] = {}  # why, by peer
        self.on_lost: Callable[[str], None] = lambda peer: None
        self._streams: dict[str, Stream] = {}
        self._sending = threading.Lock()
        self._listeners: dict[str, Listener] = {}
        self._unheard: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)  # by topic
        self._values: dict[str, bytes] = {}  # of `put`, by key
        self._changed = threading.Condition(threading.RLock())
        self._is_closed = False
        self.listen(_VALUES, self._take_value)
        self.listen(_CLOSED, lambda peer, _: self.lose(peer, _HAS_CLOSED))

    # Connecting

    def connect(self, peer: str, stream: Stream) -> None:
        """The connection with a peer is there. Any thread may call it."""
        with self._changed:
            if self._is_closed:
                stream.close()
                return
            self._streams[peer] = stream
            self._changed.notify_all()
        threading.Thread(target=self._hear, args=(peer, stream), name="crossfade-bulletin", daemon=True).start()

    def lose(self, peer: str, reason: str) -> None:
        """A peer cannot be reached, or not any more."""
        with self._changed:
            if self._is_closed or peer in self.lost:
                return
            self.lost[peer] = reason
            self._changed.notify_all()
        if reason != _HAS_CLOSED:
            self.on_lost(peer)

    def await_peers(self, timeout_s: float) -> None:
        """Waits for the connections with all peers. Raises a ConnectionError or a TimeoutError if one does not come."""
        self._await(lambda: self.peers <= self._streams.keys(), timeout_s, "did not connect")

    def _await(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until that is so; the condition is held meanwhile."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not ready():
                if self.lost or self._is_closed:
                    gone = ", ".join(f"{peer} cannot be reached: {reason}" for peer, reason in self.lost.items())
                    raise ConnectionError(gone or "the graph was given up")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"one of {', '.join(sorted(self.peers))} {what} within {timeout_s:.0f} s")

    # Telling and hearing

    def tell(self, topic: str, notice: bytes) -> None:
        """Tells all peers; those that are lost do not matter. Any thread may call it."""
        name = topic.encode()
        message = b"".join((_LENGTH.pack(len(name)), name, notice))
        failed: dict[str, str] = {}
        with self._sending:
            for peer, stream in list(self._streams.items()):
                if peer not in self.lost:
                    try:
                        stream.send(message)
                    except (OSError, EOFError) as error:
                        failed[peer] = str(error)
        for peer, reason in failed.items():
            self.lose(peer, reason)

    def listen(self, topic: str, listener: Listener) -> None:
        """From now on ``listener`` hears what is told of a topic; first of all what was told before."""
        with self._changed:
            for peer, notice in self._unheard.pop(topic, ()):
                listener(peer, notice)
            self._listeners[topic] = listener

    def _hear(self, peer: str, stream: Stream) -> None:
        try:
            while True:
                message = stream.receive()
                (length,) = _LENGTH.unpack_from(message)
                body = _LENGTH.size + length
                topic, notice = message[_LENGTH.size : body].decode(), message[body:]
                with self._changed:
                    if (listener := self._listeners.get(topic)) is None:
                        self._unheard[topic].append((peer, notice))
                    else:
                        listener(peer, notice)
        except (OSError, EOFError) as error:
            self.lose(peer, str(error) or "it has closed the connection")
        finally:
            with self._sending:
                self._streams.pop(peer, None)
                stream.close()

    # Values by key, which all of them have

    def put(self, key: str, value: bytes) -> None:
        """All have this value from now on."""
        name = key.encode()
        notice = b"".join((_LENGTH.pack(len(name)), name, value))
        self._take_value(self.me, notice)
        self.tell(_VALUES, notice)

    def _take_value(self, _: str, notice: bytes) -> None:
        (length,) = _LENGTH.unpack_from(notice)
        body = _LENGTH.size + length
        with self._changed:
            self._values[notice[_LENGTH.size : body].decode()] = notice[body:]
            self._changed.notify_all()

    def has(self, keys: Iterable[str]) -> bool:
        """Whether somebody has put a value for each key."""
        return all(key in self._values for key in keys)

    def get(self, key: str, timeout_s: float) -> bytes:
        """A value, once somebody has put it. Raises a ConnectionError if a peer is lost before, and a TimeoutError."""
        self._await(lambda: key in self._values, timeout_s, f"did not say {key!r}")
        return self._values[key]

    def close(self) -> None:
        """Says so, and ends the connections. Idempotent."""
        if not self._is_closed:
            self.tell(_CLOSED, b"")
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with self._sending:
            for stream in self._streams.values():
                stream.end()  # its thread closes it


class FarAlive:
    """Which of some peers of a bulletin cannot be reached any more, as `crossfade.host.processes.Alive` says it of processes."""

    def __init__(self, bulletin: Bulletin, names: Sequence[str]) -> None:
        self._bulletin = bulletin
        self._names = tuple(names)

    def check(self, wait_s: float = 0.0) -> list[str]:
        """Who cannot be reached; waits for the first for up to ``wait_s``."""
        bulletin = self._bulletin
        with bulletin._changed:
            bulletin._changed.wait_for(lambda: any(name in bulletin.lost for name in self._names), wait_s)
        return sorted(name for name in self._names if name in bulletin.lost)

    def close(self) -> None:
        """Nothing: the bulletin is its owner's."""
