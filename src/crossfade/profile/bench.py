"""The seam for what a measure needs beside a driver: work that computes, NCCL, the host's clock.

Two implementations: `crossfade.profile.gpu.GpuBench`, and a machine with a clock in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from crossfade.device.driver import TimedDriver

Exchange = Sequence[tuple[int, int]]
"""(rank, bytes) of what goes to, or comes from, other ranks."""


class Bench(Protocol):
    """One process's words for measuring."""

    @property
    def driver(self) -> TimedDriver:
        """Its device."""

    def now_us(self) -> float:
        """The host's clock."""

    def pause(self) -> None:
        """Lets a little time pass while the device works."""

    def fill(self, address: int, size_bytes: int) -> None:
        """Puts values into memory that are all different: what is all zeros draws less power. Waits for it."""

    def work(self, kind: str, stream: int) -> None:
        """Enqueues one unit of work: ``gemm``, a matrix product that fills the device, or ``memory``, a pass through memory."""

    def kernel(self, stream: int) -> None:
        """Enqueues a kernel that does next to nothing."""

    def join(self, store: str, rank: int, num_ranks: int) -> None:
        """Opens NCCL with all other ranks. ``store`` is a path that all of them can reach."""

    def exchange(self, sends: Exchange, receives: Exchange, stream: int) -> None:
        """Enqueues NCCL sends and receives, in one group."""

    def close(self) -> None:
        """Gives everything back."""
