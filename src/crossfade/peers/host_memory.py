"""The memory of a CPU group: each rank's buffers and signals in shared memory, kernels by torch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.host_driver import HostDriver
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.host.memory import PAGE_BYTES, Memory, align
from crossfade.peers.memory import GroupMemory, OpenedGroup, Reduction
from crossfade.peers.rendezvous import Ranks, meet

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_HINT = "all ranks must call the collectives of a lane in the same order, with the same lengths"


def _tensor_at(address: int, count: int, dtype: Any) -> torch.Tensor:
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
    first, *rest = (_tensor_at(address, reduction.count, dtype) for address in reduction.sources())
    total = first.to(wide, copy=True)
    for block in rest:
        total += block.to(wide)
    for target in reduction.targets:
        _tensor_at(target, reduction.count, dtype).copy_(total)


def open_host_memory(group: ProcessGroup, num_words: int, buffer_bytes: int, timeout_s: float) -> OpenedGroup:
    """Shares memory among the ranks. Collective."""
    torch = torch_or_raise()
    board_bytes = align(num_words * WORD_BYTES, PAGE_BYTES)
    memory = Memory.create("peers", board_bytes + buffer_bytes)
    parties = meet(Ranks.of_group(group, torch.device("cpu")), memory)
    driver = HostDriver(timeout_s, hint=_HINT)
    boards = [HostBoard(driver, party.memory, num_words, f"rank {k}") for k, party in enumerate(parties)]
    ranges = [
        driver.map_host(party.memory, board_bytes, buffer_bytes, f"buffers of rank {k}")
        for k, party in enumerate(parties)
    ]
    for party in parties:
        party.memory.close()

    def close() -> None:
        for board in boards:
            board.close()
        for each in ranges:
            each.close()

    rank = torch.distributed.get_rank(group)
    addresses = [each.address for each in ranges]
    own = _tensor_at(addresses[rank], buffer_bytes, torch.uint8)
    shared = GroupMemory(driver, HostKernels(driver), rank, len(parties), addresses, buffer_bytes, boards)
    return OpenedGroup(shared, [party.pid for party in parties], own, close)
