"""The memory of a CPU group: each rank's buffers and signals in shared memory, kernels by torch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.driver import Driver, HostRange
from crossfade.device.host_driver import HostDriver
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.host.memory import PAGE_BYTES, Memory, align
from crossfade.peers.memory import GroupMemory, OpenedGroup, Reduction
from crossfade.peers.rendezvous import Party, Ranks, meet

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

HINT = "all ranks must call the collectives of a lane in the same order, with the same lengths"


def tensor_at(address: int, count: int, dtype: Any) -> torch.Tensor:
    """What lies in memory of the host."""
    array = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch_or_raise().frombuffer(array, dtype=dtype, count=count)  # type: ignore[no-any-return]


class HostKernels:
    """See `crossfade.peers.memory.Kernels`."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        """See `Kernels`."""
        self._driver.copy(target, source, size_bytes, stream)

    def reduce(self, stream: int, reduction: Reduction) -> None:
        """See `Kernels`."""
        self._driver.do(lambda: _reduce(reduction))


def _reduce(reduction: Reduction) -> None:
    torch = torch_or_raise()
    dtype = getattr(torch, reduction.kind.name)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    first, *rest = (tensor_at(address, reduction.count, dtype) for address in reduction.sources())
    total = first.to(wide, copy=True)
    for block in rest:
        total += block.to(wide)
    for target in reduction.targets:
        tensor_at(target, reduction.count, dtype).copy_(total)


class HostBuffers(NamedTuple):
    """Every rank's buffers and signals in memory of the host, as one rank has them."""

    parties: list[Party]
    boards: list[HostBoard]
    ranges: list[HostRange]

    @property
    def addresses(self) -> list[int]:
        """Where each rank's buffers lie."""
        return [each.address for each in self.ranges]

    def close(self) -> None:
        """Gives the memory back."""
        for board in self.boards:
            board.close()
        for each in self.ranges:
            each.close()


def share_buffers(ranks: Ranks, driver: Driver, num_words: int, buffer_bytes: int) -> HostBuffers:
    """Shares memory of the host that a driver's device reaches among the ranks. Collective."""
    board_bytes = align(num_words * WORD_BYTES, PAGE_BYTES)
    parties = meet(ranks, Memory.create("peers", board_bytes + buffer_bytes))
    boards = [HostBoard(driver, party.memory, num_words, f"rank {k}") for k, party in enumerate(parties)]
    ranges = [
        driver.map_host(party.memory, board_bytes, buffer_bytes, f"buffers of rank {k}")
        for k, party in enumerate(parties)
    ]
    for party in parties:
        party.memory.close()
    return HostBuffers(parties, boards, ranges)


def open_host_memory(group: ProcessGroup, num_words: int, buffer_bytes: int, timeout_s: float) -> OpenedGroup:
    """Shares memory among the ranks. Collective."""
    torch = torch_or_raise()
    driver = HostDriver(timeout_s, hint=HINT)
    shared = share_buffers(Ranks.of_group(group, torch.device("cpu")), driver, num_words, buffer_bytes)
    rank, addresses = torch.distributed.get_rank(group), shared.addresses
    own = tensor_at(addresses[rank], buffer_bytes, torch.uint8)
    kernels = HostKernels(driver)
    memory = GroupMemory(driver, kernels, rank, len(addresses), addresses, buffer_bytes, shared.boards)
    return OpenedGroup(memory, [party.pid for party in shared.parties], own, shared.close)
