"""Names in /dev/shm: what stays there, told from what other tests, which run at the same time, have there for a moment."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["names_left", "shared_names"]

_FOLDER = Path("/dev/shm")
_LIMIT_S = 2.0


def shared_names() -> set[str]:
    """All names there now, whoever made them."""
    return {entry.name for entry in _FOLDER.iterdir()} if _FOLDER.exists() else set()


def names_left(before: set[str]) -> set[str]:
    """Names that came since ``before`` and do not go."""
    left = shared_names() - before
    deadline = time.monotonic() + _LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= shared_names()
    return left
