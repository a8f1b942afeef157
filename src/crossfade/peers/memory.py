"""What lanes stand on: a driver, kernels, memory of every rank that all ranks reach, and a row of signals into each rank.

There are three kinds: GPUs on torch's symmetric memory, CPU groups on shared memory, and the fake machine in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from crossfade.device.driver import Driver
from crossfade.device.signals import SignalBoard

if TYPE_CHECKING:
    import torch


class Kind(NamedTuple):
    """An element type."""

    name: str  # as torch calls it, without ``torch.``
    size_bytes: int  # of one element


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of one block of each rank, in the order of the ranks, so that every rank gets the same bits."""

    kind: Kind  # element type; float16 and bfloat16 are added in float32 and rounded once
    count: int  # elements in a block
    targets: tuple[int, ...]  # where the sum goes, one address or two
    own: int  # this rank's block
    slots: int  # where rank 0's block would lie; rank k's lies ``k * slot_bytes`` further, this rank's place there is not read
    slot_bytes: int  # distance of two blocks
    rank: int  # rank, num_ranks: this rank, and of how many
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
class GroupMemory:
    """What one rank has of all: its device, and every rank's memory and signals."""

    driver: Driver  # this rank's device
    kernels: Kernels  # its local part
    rank: int  # rank, num_ranks: this rank, and of how many
    num_ranks: int
    buffers: Sequence[int]  # for each rank, the address in this process of its memory
    buffer_bytes: int  # length of each
    boards: Sequence[SignalBoard]  # for each rank, the signals that others set for it; all are reachable from here

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.num_ranks) if rank != self.rank]


class OpenedGroup(NamedTuple):
    """A group's memory, and what its owner needs to close it."""

    memory: GroupMemory  # for the lanes
    pids: list[int]  # the ranks' processes
    tensor: torch.Tensor  # this rank's memory as a tensor of bytes; its owner drops it before ``close``
    close: Callable[[], None]  # gives everything back
