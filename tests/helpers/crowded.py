"""Whether others keep this machine's cores busy: then what has a time limit in seconds cannot keep to it."""

from __future__ import annotations

import os

__all__ = ["limit_s"]

_FACTOR = 5.0


def limit_s(calm_s: float) -> float:
    """A limit that holds on a machine with a core to spare, or a longer one where three programs want every core."""
    is_crowded = os.getloadavg()[0] > 3 * len(os.sched_getaffinity(0))
    return _FACTOR * calm_s if is_crowded else calm_s
