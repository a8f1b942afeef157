"""Messages between a calibration and its processes: JSON objects over a socket pair. Nothing is unpickled."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any


class Line:
    """One end of a connected socket, whose descriptor it owns."""

    def __init__(self, fd: int) -> None:
        connection = Connection(fd)
        self._send_bytes, self._receive_bytes = connection.send_bytes, connection.recv_bytes
        self.fileno, self.close = connection.fileno, connection.close

    def send(self, **message: Any) -> None:
        """Sends one message."""
        self._send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message; None at the end."""
        try:
            message: dict[str, Any] = json.loads(self._receive_bytes())
        except (EOFError, OSError):
            return None
        return message
