"""The memory of a group whose GPUs do not reach each other: buffers in pinned memory of the host, which all of them reach.

What a rank puts into another's buffer goes up by a copy engine, and what it takes out of one comes down by another. The two
directions of a link do not slow each other down, so collectives on two lanes go on beside each other. A sum is added up on the GPU:
the blocks of the others come down into its *mirror* of this rank's buffers first, and the sum goes up behind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.capabilities import judge, read_facts, require
from crossfade.device.driver import Driver
from crossfade.device.host_driver import HostDriver
from crossfade.device.tensors import load_kernels
from crossfade.errors import DeviceError
from crossfade.host.memory import Heap, Memory
from crossfade.peers.host_memory import HINT, HostBuffers, HostKernels, board_bytes, met
from crossfade.peers.memory import GroupMemory, Kernels, OpenedGroup, Reduction
from crossfade.peers.rendezvous import Ranks, gather

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


T = TypeVar("T")

_REASONS_FOR_STAGING = ("no-peer-access", "pcie")
"""What `judge` warns of, and staged groups are for."""


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
    """Shares memory among the ranks, and loads every kernel. Collective; no stream of this device may be waiting.

    Raises:
        DeviceError: the machine does not allow it, or a rank's device refused, on all ranks.
    """
    torch = torch_or_raise()
    rank, num_ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    device = torch.empty(0, device=device).device  # of 'cuda', the current one
    with ExitStack() as opened:
        own = Memory.create("peers", 0)
        opened.callback(own.close)

        def prepare() -> tuple[Driver, Kernels]:
            Heap(own).allocate(board_bytes(num_words) + buffer_bytes)  # all of its pages: they are going to be pinned
            return _driver_of(device, rank, num_ranks, timeout_s, opened)

        def share() -> tuple[HostBuffers, int]:
            mirror = driver.allocate(buffer_bytes, "mirror of buffers")
            opened.callback(driver.free, mirror)
            shared = HostBuffers(parties, driver, num_words, buffer_bytes, opened)
            _try_out(driver, mirror, shared.addresses[rank])
            return shared, mirror

        driver, kernels = _together(group, device, prepare)
        with met(Ranks.of_group(group, device), own) as parties:
            shared, mirror = _together(group, device, share)
        staged = StagedKernels(driver, kernels, shared.addresses[rank], mirror)
        memory = GroupMemory(driver, staged, rank, num_ranks, shared.addresses, buffer_bytes, shared.boards)
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        return OpenedGroup(memory, [party.pid for party in parties], nothing, opened.pop_all().close)


def _together(group: ProcessGroup, device: torch.device, step: Callable[[], T]) -> T:
    """What a step gives on this rank, once it has succeeded on all; a `DeviceError` on all of them if it failed. Collective."""
    try:
        made: T | None = step()
        failure = DeviceError("another rank could not open its memory", hint="its own error says why")
    except DeviceError as error:
        made, failure = None, error
    except OSError as error:
        made, failure = None, DeviceError(f"the host's memory: {error}", hint="give the group a smaller buffer_bytes")
    have_failed = gather(group, device, [made is None])
    if made is None or [1] in have_failed:
        raise failure
    return made


def _driver_of(
    device: torch.device, rank: int, num_ranks: int, timeout_s: float, opened: ExitStack
) -> tuple[Driver, Kernels]:
    """The driver of a device, and kernels that are loaded."""
    if device.type == "cpu":
        host = HostDriver(timeout_s, hint=HINT)
        return host, HostKernels(host)
    torch = torch_or_raise()
    from crossfade.device.cuda import CudaDriver
    from crossfade.peers.triton_kernels import TritonKernels

    require([finding for finding in judge(read_facts()) if finding.name not in _REASONS_FOR_STAGING])
    driver = CudaDriver(device.index)
    opened.callback(driver.close)
    kernels = TritonKernels(device.index, rank, num_ranks)
    kernels.load()
    load_kernels((torch.uint8,), device.index)
    torch.cuda.synchronize(device.index)
    torch.cuda.empty_cache()  # the mirror is not torch's
    return driver, kernels


def _try_out(driver: Driver, mirror: int, buffers: int) -> None:
    """Copies once each way: what a driver loads for that, it loads before any stream waits."""
    stream, event = driver.create_stream("tried out"), driver.create_host_event()
    try:
        for target, source in ((mirror, buffers), (mirror + 64, mirror), (buffers, mirror)):
            driver.copy(target, source, 33, stream)
        driver.record_event(event, stream)
        driver.wait_host(event)
    finally:
        driver.destroy_event(event)
        driver.destroy_stream(stream)
