"""Messages between a calibration and its processes: one JSON object a line, over a socket pair. Nothing is unpickled."""

from __future__ import annotations

import json
import socket
from typing import Any

_PIECE_BYTES = 1 << 16


class Line:
    """One end of a connected stream socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends one message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message; None at the end."""
        while True:
            message = self.take()
            if message is not None:
                return message
            if not self.fill():
                return None

    def fill(self) -> bool:
        """Reads what is there, and waits if that is nothing; False at the end."""
        try:
            piece = self._connection.recv(_PIECE_BYTES)
        except ConnectionError:
            return False
        self._unread += piece
        return bool(piece)

    def take(self) -> dict[str, Any] | None:
        """The next message that is whole; None if there is none yet."""
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()
