"""A clock that is slow while this machine has less to give than is asked of it.

What has to be done within a second is done within one where there is a core for it. On a busy machine a wait for a core comes on
top, which says nothing about crossfade. The kernel counts the time in which anybody waited for one ("pressure stall information",
``/proc/pressure/cpu``), and the time in which a core belonged to somebody else's machine (``steal`` in ``/proc/stat``).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")
_SLOWER = 5.0
"""How much slower it goes while somebody waits for a core, or where the kernel does not count: no limit is longer than that."""


def calm_s() -> float:
    """Seconds since some moment, the same one in all processes; those in which somebody waited for a core are a fifth as long."""
    try:
        some = _PRESSURE.read_text().split("\n", 1)[0]
    except OSError:
        return time.monotonic() / _SLOWER
    waited_s = int(some.rpartition("=")[2]) / 1e6
    with open("/proc/stat") as file:
        stolen_s = int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    return time.monotonic() - waited_s * (1 - 1 / _SLOWER) - stolen_s
