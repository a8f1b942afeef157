"""Keeps blocks that others disturbed out of the figures: a block counts if nobody else used much of the cores meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from benchmarks.workers import descendants

_T = TypeVar("_T")

LIMIT_CORES = 0.15
"""Others may use this many cores during a block."""
LOOK_S = 0.1


class Quiet:
    """Runs blocks when the machine is quiet, and again when it was not.

    Args:
        patience_s: how long, in all, to wait for quiet and to repeat blocks; after that every block counts.

    Attributes:
        others: how many cores others used during each block that counted.
        num_dropped: blocks that did not count.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.others: list[float] = []
        self.num_dropped = 0

    def run(self, block: Callable[[], _T]) -> _T:
        """The result of the first quiet run of ``block``, or of the quietest one when patience is over."""
        best: tuple[float, _T] | None = None
        while True:
            self.wait()
            start_s = time.monotonic()
            cores, result = self._watched(block)
            if best is None or cores < best[0]:
                best = cores, result
            if cores > LIMIT_CORES:
                self._patience_s -= time.monotonic() - start_s
            if best[0] <= LIMIT_CORES or self._patience_s <= 0:
                self.others.append(best[0])
                return best[1]
            self.num_dropped += 1

    def wait(self) -> bool:
        """Returns True once others have let the machine alone for a tenth of a second, False if patience is over."""
        while self._patience_s > 0:
            start_s = time.monotonic()
            cores, _ = self._watched(lambda: time.sleep(LOOK_S))
            if cores <= LIMIT_CORES:
                return True
            self._patience_s -= time.monotonic() - start_s
        return False

    def _watched(self, block: Callable[[], _T]) -> tuple[float, _T]:
        start_s, own_s, all_s = time.monotonic(), _own_s(), _busy_s()
        result = block()
        others_s = _busy_s() - all_s - (_own_s() - own_s)
        return max(0.0, others_s) / (time.monotonic() - start_s), result

    def summary(self) -> str:
        """What a report says about it."""
        worst = max(self.others, default=0.0)
        loud = sum(cores > LIMIT_CORES for cores in self.others)
        return (
            f"Other programs of the machine used at most {worst:.2f} cores during a block that counts; "
            f"{self.num_dropped} blocks were dropped and repeated, {loud} of {len(self.others)} count although others "
            f"used more than {LIMIT_CORES} cores."
        )


def _own_s() -> float:
    """CPU time of this process and of all below it, with that of threads and children of theirs that have ended."""
    ticks = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _busy_s() -> float:
    """CPU time of the whole machine since it started, stolen time included."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
