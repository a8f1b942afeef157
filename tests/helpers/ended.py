"""Processes that are to have ended."""

from __future__ import annotations

import os

from crossfade.host.processes import await_end, open_pidfd
from tests.helpers.calm import calm_s


def await_no_process(pid: int, limit_s: float = 30.0) -> None:
    """Waits until there is no process of this number, on a calm machine for so long."""
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        return
    try:
        begin_s = calm_s()
        while not await_end(pidfd, 0.05):
            assert calm_s() - begin_s < limit_s, f"process {pid} is still there"
    finally:
        os.close(pidfd)
