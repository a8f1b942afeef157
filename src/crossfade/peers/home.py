"""What lanes stand on: a driver, kernels, memory of every rank that all ranks reach, and a row of signals into each rank.

There are three homes: GPUs on torch's symmetric memory, CPU groups on shared memory, and the fake machine in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from crossfade.device.driver import Driver
from crossfade.device.signals import SignalBoard

if TYPE_CHECKING:
    import torch

__all__ = ["Home", "Kernels", "Kind", "OpenedHome", "Reduction"]


class Kind(NamedTuple):
    """An element type.

    Attributes:
        name: as torch calls it, without ``torch.``
        size_bytes: of one element.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of one block of each rank, in the order of the ranks, so that every rank gets the same bits.

    Attributes:
        kind: element type; float16 and bfloat16 are added in float32 and rounded once.
        count: elements in a block.
        targets: where the sum goes, one address or two.
        own: this rank's block.
        slots: where rank 0's block would lie; rank k's lies ``k * slot_bytes`` further, this rank's place there is not read.
        slot_bytes: distance of two blocks.
        rank, num_ranks: this rank, and of how many.
    """

    kind: Kind
    count: int
    targets: tuple[int, ...]
    own: int
    slots: int
    slot_bytes: int
    rank: int
    num_ranks: int

    def sources(self) -> list[int]:
        """The addresses of all blocks, in the order of the ranks."""
        return [self.own if k == self.rank else self.slots + k * self.slot_bytes for k in range(self.num_ranks)]


class Kernels(Protocol):
    """The local part, which copy engines do badly or not at all. Every kernel is loaded before the first call."""

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        """Enqueues a copy inside one device."""

    def reduce(self, stream: int, reduction: Reduction) -> None:
        """Enqueues a sum."""


@dataclass(frozen=True)
class Home:
    """What one rank has of all.

    Attributes:
        driver: this rank's device.
        kernels: its local part.
        rank, num_ranks: this rank, and of how many.
        buffers: for each rank, the address in this process of its memory.
        buffer_bytes: length of each.
        boards: for each rank, the signals that others set for it; this process can reach all of them.
    """

    driver: Driver
    kernels: Kernels
    rank: int
    num_ranks: int
    buffers: Sequence[int]
    buffer_bytes: int
    boards: Sequence[SignalBoard]

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.num_ranks) if rank != self.rank]


class OpenedHome(NamedTuple):
    """A home, and what its owner needs besides.

    Attributes:
        home: for the lanes.
        pids: the ranks' processes.
        memory: this rank's memory as a tensor of bytes; its owner lets go of it before ``close``.
        close: gives everything back.
    """

    home: Home
    pids: list[int]
    memory: torch.Tensor
    close: Callable[[], None]
