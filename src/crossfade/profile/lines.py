"""Messages between a calibration and its processes: JSON objects over a socket pair. Nothing is unpickled."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any


class Line:
    """One end of a connected socket, whose descriptor it owns."""

    def __init__(self, fd: int) -> None:
        connection = Connection(fd)
        self._send, self._receive = connection.send_bytes, connection.recv_bytes
        self.fileno, self.close = connection.fileno, connection.close

    def tell(self, **message: Any) -> None:
        """Sends one message."""
        self._send(json.dumps(message).encode())

    def hear(self) -> dict[str, Any] | None:
        """Waits for the next message; None at the end."""
        try:
            message: dict[str, Any] = json.loads(self._receive())
        except (EOFError, OSError):
            return None
        return message
