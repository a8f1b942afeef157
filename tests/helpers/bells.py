"""Bells of doorbells that nobody sleeps at."""

from __future__ import annotations

from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import Memory


def new_bell() -> Bell:
    memory_fd, event_fd = Doorbell.create_fds("test")
    return Bell(Memory(memory_fd), event_fd)
