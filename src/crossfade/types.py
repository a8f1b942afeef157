"""Words that every room shares: names of things, transports."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DRIVER", "Transport"]

DRIVER = "driver"
"""The name of the driving process in plans; no actor may have it."""


class Transport(StrEnum):
    """How a channel moves bytes.

    ``auto`` is a request, the others are what a plan shows.
    """

    AUTO = "auto"
    SHM = "shm"
    """A ring in shared memory, for processes of one host."""
    GLOO = "gloo"
    """torch.distributed's gloo, for CPU tensors; moves bytes in the background of both sides."""
