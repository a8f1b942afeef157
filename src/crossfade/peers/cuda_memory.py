"""The memory of a group of GPUs on one host: buffers on torch's symmetric memory, signals in pinned host memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.capabilities import check_pairs, judge, read_facts, require
from crossfade.device.cuda import CudaDriver
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.device.tensors import load_kernels
from crossfade.errors import DeviceError
from crossfade.host.memory import PAGE_BYTES, Memory, align
from crossfade.peers.memory import GroupMemory, OpenedGroup
from crossfade.peers.rendezvous import Ranks, await_all, gather, meet
from crossfade.peers.triton_kernels import TritonKernels

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def open_cuda_memory(group: ProcessGroup, device: torch.device, num_words: int, buffer_bytes: int) -> OpenedGroup:
    """Shares memory among the ranks, and loads every kernel. Collective; no stream of this device may be waiting."""
    torch = torch_or_raise()
    check_machine()
    os.environ.setdefault(_MULTICAST_OFF, "1")  # read when symmetric memory is first used
    index = torch.empty(0, device=device).device.index  # of 'cuda', the current one
    tensor = _allocate(group, index, buffer_bytes)
    driver = CudaDriver(index)
    memory = Memory.create("peers", align(num_words * WORD_BYTES, PAGE_BYTES))
    parties = meet(Ranks.of_group(group, torch.device("cuda", index)), memory)
    addresses = _share(group, index, tensor)
    rank = torch.distributed.get_rank(group)
    boards = [HostBoard(driver, party.memory, num_words, f"rank {k}") for k, party in enumerate(parties)]
    for party in parties:
        party.memory.close()
    kernels = TritonKernels(index, rank, len(parties))
    kernels.load()
    load_kernels((torch.uint8,), index)
    torch.cuda.synchronize(index)
    await_all(group, torch.device("cuda", index))

    def close() -> None:
        for board in boards:
            board.close()
        driver.close()

    shared = GroupMemory(driver, kernels, rank, len(parties), addresses, buffer_bytes, boards)
    return OpenedGroup(shared, [party.pid for party in parties], tensor, close)


def check_machine() -> None:
    """Raises a `DeviceError` where the GPUs of this host do not reach each other, the same on all ranks."""
    facts = read_facts()
    require(judge(facts))
    check_pairs(facts.links, facts.links, hint="use torch.distributed's own collectives here")


def _allocate(group: ProcessGroup, device: int, size_bytes: int) -> torch.Tensor:
    """Symmetric memory of this rank. All ranks fail where one does, or the others would wait for it. Collective."""
    library = torch_or_raise()
    where = library.device("cuda", device)
    tensor: torch.Tensor | None = None
    why: RuntimeError | None = None
    try:
        tensor = _symmetric().empty(size_bytes, dtype=library.uint8, device=where)
    except RuntimeError as error:
        why = error
    rows = gather(group, where, [tensor is not None])
    if tensor is None or [0] in rows:
        raise DeviceError(
            f"rank {rows.index([0])} could not allocate {size_bytes >> 20} MB of shared memory on its GPU",
            hint="leave it as much, or give buffer_bytes or heap_bytes of less",
        ) from why
    return tensor


def _share(group: ProcessGroup, device: int, tensor: torch.Tensor) -> list[int]:
    """Where every rank's symmetric memory is in this process."""
    torch = torch_or_raise()
    handle = _symmetric().rendezvous(tensor, group.group_name)
    if handle is None:
        raise DeviceError(
            "torch's symmetric memory could not be set up", hint="the GPUs need peer access to each other"
        )
    # All ranks' tensors lie equally far behind the beginning of their allocations.
    offset = tensor.data_ptr() - int(handle.buffer_ptrs[torch.distributed.get_rank(group)])
    return [int(pointer) + offset for pointer in handle.buffer_ptrs]


def _symmetric() -> Any:
    torch_or_raise()
    import torch.distributed._symmetric_memory as symmetric  # type: ignore[import-not-found,unused-ignore]

    return symmetric
