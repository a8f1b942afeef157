"""Processes that are to have ended."""

from __future__ import annotations

import os

from crossfade.host.processes import await_end, open_pidfd


def await_no_process(pid: int, limit_s: float = 30.0) -> None:
    """Waits until there is no process of this number."""
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        return
    try:
        assert await_end(pidfd, limit_s), f"process {pid} is still there"
    finally:
        os.close(pidfd)
