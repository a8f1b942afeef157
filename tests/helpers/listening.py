"""What processes listen on, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"
_LOOPBACKS = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


class Bound(NamedTuple):
    """A socket that others can find."""

    address: str  # ``127.0.0.1``, ``elsewhere`` or, for UNIX sockets, the name
    port: int  # of TCP; 0 for UNIX sockets


def _sockets_of(pid: int) -> set[str]:
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def bound_sockets(pids: Iterable[int]) -> list[Bound]:
    """Listening TCP sockets and UNIX sockets with a name, of all these processes."""
    inodes = set().union(*map(_sockets_of, pids))
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append(Bound("127.0.0.1" if address in _LOOPBACKS else "elsewhere", int(port, 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[6] in inodes:
            found.append(Bound(fields[7], 0))
    return found
