"""What a process holds, by the system's own account."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path

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


_COUNTED = {"num_descriptors", "num_threads", "num_ring_mappings", "num_watched"}


@dataclass(frozen=True)
class Footprint:
    """Attributes are counts and sizes at one moment.

    ``ring_bytes`` is the process's proportional share of crossfade's own shared memory, ``num_watched`` what its epolls watch.
    """

    private_bytes: int
    shared_bytes: int
    ring_bytes: int
    num_descriptors: int
    num_threads: int
    num_ring_mappings: int
    num_watched: int


def footprint(pid: int) -> Footprint:
    """Of a process of ours."""
    with open(f"/proc/{pid}/status") as file:
        status = dict(re.findall(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", file.read(), re.MULTILINE))
    num_mappings, ring_kib, is_ring = 0, 0, False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                is_ring = "memfd:crossfade" in line
                num_mappings += is_ring
            elif is_ring and line.startswith("Pss:"):
                ring_kib += int(line.split()[1])
    descriptors = os.listdir(f"/proc/{pid}/fd")
    return Footprint(
        int(status["RssAnon"]) * 1024,
        int(status["RssShmem"]) * 1024,
        ring_kib * 1024,
        len(descriptors),
        int(status["Threads"]),
        num_mappings,
        sum(map(_num_watched, (f"/proc/{pid}/fdinfo/{fd}" for fd in descriptors))),
    )


def _num_watched(path: str) -> int:
    try:
        with open(path) as file:
            return sum(line.startswith("tfd:") for line in file)
    except FileNotFoundError:  # the descriptor that listed the folder
        return 0


def growth(before: Footprint, after: Footprint) -> dict[str, int]:
    """What has grown, by how much."""
    differences = {each.name: getattr(after, each.name) - getattr(before, each.name) for each in fields(Footprint)}
    return {name: difference for name, difference in differences.items() if difference > 0}


def settled_growth(
    before: Footprint, pid: int, awaited: Set[str] = _COUNTED, limit_s: float = 10.0, pause_s: float = 0.01
) -> dict[str, int]:
    """As `growth`, once what is given back behind the scenes is: a thread that was joined is still counted for a moment."""
    end_s = time.monotonic() + limit_s
    while True:
        grown = growth(before, footprint(pid))
        if awaited.isdisjoint(grown) or time.monotonic() > end_s:
            return grown
        time.sleep(pause_s)


def check_growth(cycle: Callable[[int], None], pids: Sequence[int]) -> None:
    """What comes and goes twenty times more leaves nothing in these processes."""
    cycle(5)
    before = [footprint(pid) for pid in pids]
    cycle(20)
    for first, pid in zip(before, pids, strict=True):
        grown = settled_growth(first, pid)
        assert grown.pop("private_bytes", 0) < 4 << 20, grown
        assert grown.pop("shared_bytes", 0) < 1 << 20
        assert grown.pop("ring_bytes", 0) < 1 << 16, (pid, pids, grown)
        assert grown == {}


def held_more(before: Footprint) -> dict[str, int]:
    """What this process holds more than before. (Memory that was freed is counted until the allocator gives it back.)"""
    ctypes.CDLL(None).malloc_trim(0)
    return settled_growth(before, os.getpid(), {"num_threads"}, 1.0, 0.001)


def counts_more(before: Footprint) -> dict[str, int]:
    """As `held_more`, but for memory, which the interpreter keeps."""
    return {name: more for name, more in held_more(before).items() if name in _COUNTED}
