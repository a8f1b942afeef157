"""What a CUDA call of the host is for, by its name."""

from __future__ import annotations

import re
from enum import IntEnum


class Role(IntEnum):
    """What a CUDA call of the host is for, as far as it matters to when others run."""

    LAUNCH = 0  # a kernel, a copy or a graph
    RECORD = 1  # an event
    WAIT_EVENT = 2  # a stream waits for an event; the host does not
    SYNC_STREAM = 3
    SYNC_EVENT = 4
    SYNC_DEVICE = 5
    ALLOCATE = 6
    FREE = 7


_ROLES = [
    (r"cu(da)?(LaunchKernel|LaunchCooperative|LaunchHost|GraphLaunch|Mem(cpy|set))", Role.LAUNCH),
    (r"cu(da)?EventRecord", Role.RECORD),
    (r"cu(da)?StreamWaitEvent", Role.WAIT_EVENT),
    (r"cu(da)?StreamSynchronize", Role.SYNC_STREAM),
    (r"cu(da)?EventSynchronize", Role.SYNC_EVENT),
    (r"cudaDeviceSynchronize|cuCtxSynchronize", Role.SYNC_DEVICE),
    (r"cudaMalloc|cuMemAlloc|cudaHostAlloc|cuMemCreate", Role.ALLOCATE),
    (r"cudaFree|cuMemFree|cuMemUnmap", Role.FREE),
]


def role_of(name: str) -> Role | None:
    """None for a call that matters to nobody."""
    return next((role for pattern, role in _ROLES if re.match(pattern, name)), None)
