"""The memory of a CPU group: each rank's buffers and signals in shared memory, kernels by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.driver import Driver
from crossfade.device.host_driver import HostDriver
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.host.memory import PAGE_BYTES, Memory, align
from crossfade.peers.memory import GroupMemory, OpenedGroup, Reduction
from crossfade.peers.rendezvous import Party, Ranks, meet

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

HINT = "all ranks must call the collectives of a lane in the same order, with the same lengths"


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


class HostBuffers:
    """Every rank's signals and buffers in memory of the host, as one rank reaches them.

    ``opened`` gives back what is made, also where the next step fails. Raises a `DeviceError` if a device refuses.
    """

    def __init__(
        self, parties: Sequence[Party], driver: Driver, num_words: int, buffer_bytes: int, opened: ExitStack
    ) -> None:
        self.boards: list[HostBoard] = []
        self.addresses: list[int] = []  # where each rank's buffers lie
        for rank, party in enumerate(parties):
            self.boards.append(HostBoard(driver, party.memory, num_words, f"rank {rank}"))
            opened.callback(self.boards[-1].close)
            mapped = driver.map_host(party.memory, board_bytes(num_words), buffer_bytes, f"buffers of rank {rank}")
            opened.callback(mapped.close)
            self.addresses.append(mapped.address)


def board_bytes(num_words: int) -> int:
    """How much of a rank's memory lies before its buffers."""
    return align(num_words * WORD_BYTES, PAGE_BYTES)


@contextmanager
def met(ranks: Ranks, memory: Memory) -> Iterator[list[Party]]:
    """The ranks, each with memory for its signals and buffers, to be mapped inside. Collective."""
    parties = meet(ranks, memory)
    try:
        yield parties
    finally:
        for party in parties:
            party.memory.close()


def open_host_memory(group: ProcessGroup, num_words: int, buffer_bytes: int, timeout_s: float) -> OpenedGroup:
    """Shares memory among the ranks. Collective."""
    torch = torch_or_raise()
    driver, rank = HostDriver(timeout_s, hint=HINT), torch.distributed.get_rank(group)
    ranks = Ranks.of_group(group, torch.device("cpu"))
    own_memory = Memory.create("peers", board_bytes(num_words) + buffer_bytes)
    with ExitStack() as opened, met(ranks, own_memory) as parties:
        shared = HostBuffers(parties, driver, num_words, buffer_bytes, opened)
        own = _tensor_at(shared.addresses[rank], buffer_bytes, torch.uint8)
        where = shared.addresses, buffer_bytes, shared.boards
        memory = GroupMemory(driver, HostKernels(driver), rank, len(parties), *where)
        return OpenedGroup(memory, [party.pid for party in parties], own, opened.pop_all().close)
