"""How a process that somebody else has started comes to be an actor of this driver: by a UNIX socket, and a key.

Such a process inherits nothing, so what a child would inherit is handed to it here. The socket lies in a folder that only this user
may enter, and is there only as long as one process is waited for, which shows that it has the key before it is given anything.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from crossfade.errors import ActorStartError
from crossfade.host.frames import FrameError
from crossfade.host.processes import await_end
from crossfade.host.sockets import Connection

_CREDENTIALS = struct.Struct("3i")
_PROOF_S = 5.0
_LOOK_S = 0.2
_LONGEST_S = 1e6
_HERE = b"here"


class Guest:
    """A `Child` that somebody else has started, who gets its exit status. What ``is_borrowed`` is not even ours to end."""

    def __init__(self, pid: int, *, is_borrowed: bool, where: str) -> None:
        self.pid = pid
        self._where = where
        self.is_borrowed = is_borrowed

    def await_exit(self, pidfd: int) -> int | None:
        if not self.is_borrowed:
            await_end(pidfd, _LONGEST_S)
        return None

    def describe(self, code: int | None) -> str:
        return f"its process{self._where} has ended"

    def discard(self) -> None:
        """It is not ours to end."""


class Admission:
    """Waits for one process. A context manager: ``path`` is where that process has to connect."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        with ExitStack() as undo:
            folder = tempfile.mkdtemp(prefix="crossfade-")
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            self.path = os.path.join(folder, "door")
            self._listening = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._listening.bind(self.path)
            self._listening.listen()
            self._listening.settimeout(_LOOK_S)
            self._undo = undo.pop_all()

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody is admitted any more."""
        self._undo.close()

    def admit(
        self,
        fds: Sequence[int],
        raise_if_lost: Callable[[], None],
        timeout_s: float,
        *,
        is_borrowed: bool,
        where: str = "",
    ) -> Guest:
        """Gives the descriptors to the process that comes and has the key. An `ActorStartError` if none comes within the time, or
        what ``raise_if_lost`` raises.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            raise_if_lost()
            try:
                sock, _ = self._listening.accept()
            except TimeoutError:
                continue
            connection = Connection(sock, self._key, "driver")
            try:
                if _received(connection) == (_HERE, ()):
                    connection.send(b"", tuple(fds))
                    pid, *_ = _CREDENTIALS.unpack(
                        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                    )
                    return Guest(pid, is_borrowed=is_borrowed, where=where)
            except (FrameError, ConnectionError):
                pass  # a stranger
            finally:
                connection.close()
        raise ActorStartError(f"its process did not come within {timeout_s} s")


def _received(connection: Connection) -> tuple[bytes, tuple[int, ...]] | None:
    connection.wait(_PROOF_S)
    message = connection.take()
    return None if message is None else (message.payload, message.fds)


def come_in(path: str, key: bytes) -> tuple[int, ...]:
    """The descriptors that a driver has for this process."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    connection = Connection(sock, key, "actor")
    try:
        connection.send(_HERE)
        deadline = time.monotonic() + _PROOF_S
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                if (received := _received(connection)) is not None:
                    return received[1]
        raise ConnectionError("the driver does not answer")
    finally:
        connection.close()
