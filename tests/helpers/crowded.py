"""Whether others keep this machine's cores busy: then what has a time limit in seconds cannot keep to it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["limit_s"]

_FACTOR = 5.0
_STOLEN = 0.02
"""Of the time of all cores; where a virtual machine has its cores to itself it is none."""


def limit_s(calm_s: float) -> float:
    """A limit that holds on a machine with a core to spare, or a longer one where three programs want every core, or where the
    host has taken cores away from this machine since the tests began.
    """
    is_crowded = os.getloadavg()[0] > 3 * len(os.sched_getaffinity(0))
    return _FACTOR * calm_s if is_crowded or _stolen_share(_AT_FIRST, _ticks()) > _STOLEN else calm_s


def _ticks() -> tuple[int, int]:
    """What was stolen, and all, since the machine began: of user, nice, system, idle, iowait, irq, softirq and steal."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (ticks[7] if len(ticks) == 8 else 0), sum(ticks)


def _stolen_share(first: tuple[int, int], last: tuple[int, int]) -> float:
    return (last[0] - first[0]) / max(last[1] - first[1], 1)


_AT_FIRST = _ticks()
