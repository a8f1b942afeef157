"""Python's search for garbage, for commands that make millions of objects, all of them in use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is not looked for meanwhile: that takes a third of a large plan's time, and two fifths of a long trace's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
