"""What this machine lets this process use, without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile

from crossfade.host.doorbell import DEVICE_SPIN_US
from crossfade.plan.plan import Plan

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
    return count_gpus(names, visible_gpus())


def spin_us_for(plan: Plan) -> float:
    """How long processes of a plan should look for work, at least, before they sleep."""
    return DEVICE_SPIN_US if plan.devices and num_visible_gpus() else 0.0


def visible_gpus() -> str | None:
    """What ``CUDA_VISIBLE_DEVICES`` says; None for nothing."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def count_gpus(device_files: Sequence[str], visible: str | None) -> int:
    """As `num_visible_gpus`, from the names of files in /dev.

    ``visible`` is ``CUDA_VISIBLE_DEVICES``: indices and UUIDs, up to the first that is neither; None for all.
    """
    num_devices = sum(_DEVICE.match(name) is not None for name in device_files)
    if visible is None:
        return num_devices
    return min(len(_chosen(visible)), num_devices)


def gpu_uuids(host: Sequence[str], visible: str | None) -> dict[int, str]:
    """UUIDs of the GPUs that a CUDA program started now would see, by the numbers that it would give them.

    ``host`` has the UUIDs of the host's GPUs, in CUDA's order; those that are not there stay unknown.
    """
    entries = map(str, range(len(host))) if visible is None else _chosen(visible)
    found: dict[int, str] = {}
    for number, entry in enumerate(entries):
        same = host[int(entry) : int(entry) + 1] if entry.isdecimal() else [u for u in host if u.startswith(entry)]
        if len(same) == 1:
            found[number] = same[0]
    return found


def _chosen(visible: str) -> list[str]:
    """The entries of ``CUDA_VISIBLE_DEVICES``, up to the first that is neither an index nor a UUID."""
    entries = map(str.strip, visible.split(","))
    return list(takewhile(lambda entry: entry.isdecimal() or entry.startswith(("GPU-", "MIG-")), entries))
