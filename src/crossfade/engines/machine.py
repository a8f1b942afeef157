"""What this machine lets this process use, without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

__all__ = ["count_gpus", "num_usable_cores", "num_visible_gpus"]

_DEVICE = re.compile(r"nvidia\d+\Z")


def num_usable_cores() -> int:
    """Cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def num_visible_gpus() -> int:
    """GPUs that a CUDA program started now would see, by the device files and ``CUDA_VISIBLE_DEVICES``."""
    try:
        names = os.listdir("/dev")
    except OSError:
        names = []
    return count_gpus(names, os.environ.get("CUDA_VISIBLE_DEVICES"))


def count_gpus(device_files: Sequence[str], visible: str | None) -> int:
    """As `num_visible_gpus`.

    Args:
        device_files: names of files in /dev; those called nvidia0, nvidia1, ... are GPUs.
        visible: ``CUDA_VISIBLE_DEVICES``: indices and UUIDs, up to the first that is neither; None for all.
    """
    num_devices = sum(_DEVICE.match(name) is not None for name in device_files)
    if visible is None:
        return num_devices
    num_chosen = 0
    for entry in map(str.strip, visible.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        num_chosen += 1
    return min(num_chosen, num_devices)
