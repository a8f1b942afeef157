"""The memory of a group whose GPUs do not reach each other: buffers in pinned memory of the host, which all of them reach.

What a rank puts into another's buffer goes up by a copy engine, and what it takes out of one comes down by another. The two
directions of a link do not slow each other down, so collectives on two lanes go on beside each other. A sum is added up on the GPU:
the blocks of the others come down into its *mirror* of this rank's buffers first, and the sum goes up behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.driver import Driver
from crossfade.device.host_driver import HostDriver
from crossfade.device.tensors import load_kernels
from crossfade.peers.host_memory import HINT, HostKernels, share_buffers, tensor_at
from crossfade.peers.memory import GroupMemory, Kernels, OpenedGroup, Reduction
from crossfade.peers.rendezvous import Ranks, await_all

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class StagedKernels:
    """See `crossfade.peers.memory.Kernels`. ``kernels`` add up on the device; ``buffers``, ``mirror``: where this rank's buffers
    lie, and as much memory of the device.
    """

    def __init__(self, driver: Driver, kernels: Kernels, buffers: int, mirror: int) -> None:
        self._driver = driver
        self._kernels = kernels
        self.mirror = mirror
        self._to_mirror = mirror - buffers

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        """See `Kernels`."""
        self._driver.copy(target, source, size_bytes, stream)

    def reduce(self, stream: int, reduction: Reduction) -> None:
        """See `Kernels`. The first target is on the device, another one in a buffer."""
        size_bytes = reduction.count * reduction.kind.size_bytes
        for rank, block in enumerate(reduction.sources()):
            if rank != reduction.rank:
                self._driver.copy(block + self._to_mirror, block, size_bytes, stream)
        here, *above = reduction.targets
        slots = reduction.slots + self._to_mirror
        self._kernels.reduce(stream, replace(reduction, targets=(here,), slots=slots))
        for target in above:
            self._driver.copy(target, here, size_bytes, stream)


def open_staged_memory(
    group: ProcessGroup, device: torch.device, num_words: int, buffer_bytes: int, timeout_s: float
) -> OpenedGroup:
    """Shares memory among the ranks, and loads every kernel. Collective; no stream of this device may be waiting."""
    torch = torch_or_raise()
    rank, num_ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    device = torch.empty(0, device=device).device  # of 'cuda', the current one
    driver, kernels, close_driver = _driver_of(device, rank, num_ranks, timeout_s)
    shared = share_buffers(Ranks.of_group(group, device), driver, num_words, buffer_bytes)
    addresses = shared.addresses
    mirror = driver.allocate(buffer_bytes, "mirror of buffers")
    await_all(group, device)

    def close() -> None:
        shared.close()
        driver.free(mirror)
        close_driver()

    staged = StagedKernels(driver, kernels, addresses[rank], mirror)
    memory = GroupMemory(driver, staged, rank, num_ranks, addresses, buffer_bytes, shared.boards)
    own = tensor_at(addresses[rank], buffer_bytes, torch.uint8)
    return OpenedGroup(memory, [party.pid for party in shared.parties], own, close)


def _driver_of(
    device: torch.device, rank: int, num_ranks: int, timeout_s: float
) -> tuple[Driver, Kernels, Callable[[], None]]:
    """The driver of a device, kernels that are loaded, and what gives the driver back."""
    if device.type == "cpu":
        host = HostDriver(timeout_s, hint=HINT)
        return host, HostKernels(host), lambda: None
    torch = torch_or_raise()
    from crossfade.device.cuda import CudaDriver
    from crossfade.peers.triton_kernels import TritonKernels

    driver, kernels = CudaDriver(device.index), TritonKernels(device.index, rank, num_ranks)
    kernels.load()
    load_kernels((torch.uint8,), device.index)
    torch.cuda.synchronize(device.index)
    return driver, kernels, driver.close
