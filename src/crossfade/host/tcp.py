"""TCP connections between processes on different hosts, which both sides open with a key that only they have.

Framing and proof of the key are those of the standard library (`multiprocessing.connection`): each side answers the other's random
challenge by an HMAC. A process listens on one address, on a port that the system chooses, until all of its peers have come.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from ipaddress import IPv4Address
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import MappingProxyType
from typing import Any

from crossfade.errors import DeviceError

_KEY_BITS = 62
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_NUMBER = struct.Struct("<q")
_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 5,  # seconds of silence before the other host is asked whether it is there,
    socket.TCP_KEEPINTVL: 3,  # seconds between questions,
    socket.TCP_KEEPCNT: 3,  # and how many remain without an answer
    socket.TCP_USER_TIMEOUT: 15_000,  # ms that sent bytes may remain unconfirmed
}
"""A process that dies is told of at once; that a host or a link to it is gone, within 20 seconds."""
PROMPT = {
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 8_000,
}
"""The same within ten seconds. With 1 % of packets lost three questions in a row are lost once in a million times."""
_PROOF_S = 5.0
"""How long whoever has connected may take to show that he has the key: others wait meanwhile."""
_STRANGERS = 100
"""How many more than the peers may knock at once."""
_HINT = "set GLOO_SOCKET_IFNAME to the network interface by which the hosts reach each other"


class Stream:
    """Messages between two processes, and plain bytes. One thread at a time sends, and one receives. Errors are an `OSError` or an
    `EOFError`.
    """

    def __init__(self, connected: socket.socket, options: Mapping[int, int] = MappingProxyType({})) -> None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {**_OPTIONS, **options}.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket = connected
        self._connection = Connection(os.dup(connected.fileno()))

    def send(self, message: bytes) -> None:
        """Sends a message."""
        self._connection.send_bytes(message)

    def receive(self) -> bytes:
        """The next message."""
        return self._connection.recv_bytes()

    def send_plain(self, data: memoryview) -> None:
        """Sends bytes from where they lie, with nothing around them."""
        self.socket.sendall(data)

    def receive_plain(self, target: memoryview) -> None:
        """Receives as many bytes as find room there."""
        while target:
            length = self.socket.recv_into(target)
            if not length:
                raise EOFError("the connection was closed")
            target = target[length:]

    def prove(self, key: bytes, *, is_first: bool, limit_s: float) -> None:
        """Shows that this side has the key, and that the other one does. Raises an error if that side does not within the time."""
        self._limit(limit_s)
        connection: Any = self._connection
        for step in (deliver_challenge, answer_challenge) if is_first else (answer_challenge, deliver_challenge):
            step(connection, key)

    def _limit(self, limit_s: float) -> None:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6)))

    def be_patient(self) -> None:
        """Calls wait without a limit from now on."""
        self._limit(0)

    def end(self) -> None:
        """Both sides' calls end, in whatever thread. Idempotent."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Releases it; no call may be under way. Idempotent."""
        self.socket.close()
        self._connection.close()


def own_address() -> str:
    """The IPv4 address by which other hosts reach this one, as far as the environment tells.

    It is that of the interface in GLOO_SOCKET_IFNAME, or of the way to MASTER_ADDR, or that of the host's name.
    """
    interface, master = os.environ.get("GLOO_SOCKET_IFNAME", ""), os.environ.get("MASTER_ADDR", "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            asked = struct.pack("256s", interface.split(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)[20:24])
        if master:
            probe.connect((master, 1))  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address. An OSError if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)[20:24]) == address:
                    return name
    raise OSError(f"no network interface has the address {address}")


_nccls: list[str] = []  # the address at which NCCL meets others in this process, once that is decided


def let_nccl_meet_at(address: str) -> None:
    """NCCL's set-up listens at this address of the host. It asks once in a process, so the first call counts. An OSError if no
    network interface has the address.
    """
    if not _nccls:
        os.environ["NCCL_SOCKET_IFNAME"] = interface_of(address)
        _nccls.append(address)


def open_streams(
    rank: int, peers: Sequence[int], gather: Callable[[list[int]], list[list[int]]], timeout_s: float
) -> dict[int, Stream]:
    """A stream to each of these ranks, for which this one is among theirs. ``gather`` gives all ranks' numbers; collective.

    Raises:
        DeviceError: not all could be opened within the time.
    """
    deadline = time.monotonic() + timeout_s
    streams: dict[int, Stream] = {}
    with ExitStack() as undo:
        try:
            place = (own_address() if peers else "127.0.0.1", 0)
            listening = undo.enter_context(socket.create_server(place, backlog=len(peers) + _STRANGERS))
            address, port = listening.getsockname()
            keys = [secrets.randbits(_KEY_BITS) for _ in range(2)]
            rows = gather([int(IPv4Address(address)), port, *keys])
            for peer in sorted(peers):
                if peer < rank:
                    streams[peer] = _connect(rank, rows[peer], deadline)
            while len(streams) < len(peers):
                _accept(listening, _key_of(rows[rank]), streams, peers, deadline)
        except (OSError, EOFError) as error:
            for stream in streams.values():
                stream.close()
            left = ", ".join(f"rank {peer}" for peer in peers if peer not in streams)
            raise DeviceError(f"no connection with {left} could be opened: {error}", hint=_HINT) from None
    for stream in streams.values():
        stream.be_patient()
    return streams


def _key_of(row: Sequence[int]) -> bytes:
    return b"".join(map(_NUMBER.pack, row[2:]))


def _connect(rank: int, row: Sequence[int], deadline: float) -> Stream:
    left_s = max(deadline - time.monotonic(), 0.1)
    connected = socket.create_connection((str(IPv4Address(row[0])), row[1]), timeout=left_s)
    connected.settimeout(None)
    stream = Stream(connected)
    try:
        stream.prove(_key_of(row), is_first=False, limit_s=left_s)
        stream.send(_NUMBER.pack(rank))
    except BaseException:
        stream.close()
        raise
    return stream


def _accept(
    listening: socket.socket, key: bytes, streams: dict[int, Stream], peers: Sequence[int], deadline: float
) -> None:
    """Takes one connection; one that does not have the key, or is not waited for, is closed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    listening.settimeout(left_s)
    connected, _ = listening.accept()
    connected.settimeout(None)
    stream = Stream(connected)
    peer: Any = None
    with suppress(OSError, EOFError, AuthenticationError, struct.error):
        stream.prove(key, is_first=True, limit_s=min(left_s, _PROOF_S))
        (peer,) = _NUMBER.unpack(stream.receive())
    if peer in peers and peer not in streams:
        streams[peer] = stream
    else:
        stream.close()


class Meeting:
    """Where others may connect: one listening socket, and a thread that finds out who has the key. ``on_come`` is called, in that
    thread, with the name that one has said and the stream; it returns whether that one was waited for.
    """

    def __init__(self, address: str, key: bytes, on_come: Callable[[str, Stream], bool]) -> None:
        self._key = key
        self._on_come = on_come
        self._listening = socket.create_server((address, 0), backlog=_STRANGERS)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept_all, name="crossfade-meeting", daemon=True).start()

    def _accept_all(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connected, _ = self._listening.accept()
                stream = Stream(connected, PROMPT)
                if not self._is_welcome(stream):
                    stream.close()

    def _is_welcome(self, stream: Stream) -> bool:
        with suppress(OSError, EOFError, AuthenticationError, UnicodeDecodeError):
            stream.prove(self._key, is_first=True, limit_s=_PROOF_S)
            name = stream.receive().decode()
            stream.be_patient()
            return self._on_come(name, stream)
        return False

    def close(self) -> None:
        """Nobody is let in any more. Idempotent."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def meet(address: str, port: int, key: bytes, name: str, limit_s: float) -> Stream:
    """A stream to who has a `Meeting` there and is told ``name``. An OSError or EOFError if nobody with the key answers."""
    connected = socket.create_connection((address, port), timeout=limit_s)
    connected.settimeout(None)
    stream = Stream(connected, PROMPT)
    try:
        stream.prove(key, is_first=False, limit_s=limit_s)
        stream.send(name.encode())
    except AuthenticationError as error:
        stream.close()
        raise ConnectionError(f"who listens there does not have the key: {error}") from None
    except BaseException:
        stream.close()
        raise
    stream.be_patient()
    return stream
