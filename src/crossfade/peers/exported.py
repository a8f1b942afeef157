"""The memory of ranks that have no torch.distributed group: exported memory of each one's device, signals in memory that all share.

How the ranks find each other is their caller's business (actors do it in `collectives.opening`): here come, for each rank, a
process, a memory with room for its signals, and a handle of its buffers. Over `device.host_driver` CPU tensors stand for a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import permutations
from typing import Any, NamedTuple

from crossfade.device.borrowed import device_of, tensor_on, torch_or_raise
from crossfade.device.capabilities import check_pairs, judge, read_facts, require
from crossfade.device.driver import HOST, Driver
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Block, OpenedMemory
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.device.tensors import load_kernels
from crossfade.host.memory import Memory, align
from crossfade.peers.group import PeerGroup
from crossfade.peers.host_memory import HostKernels
from crossfade.peers.lane import NUM_EPOCHS, SLOT_ALIGNMENT, Lane, num_words
from crossfade.peers.memory import GroupMemory, Kernels, OpenedGroup
from crossfade.topology import LinkKind


class Rank(NamedTuple):
    """What one rank tells the others."""

    name: str  # for errors
    pid: int  # its process
    memory: Memory  # shared, with zeroed room for signals; stays the caller's
    handle: bytes  # of its buffers
    device: int  # where these lie, as the driver counts


class Shape(NamedTuple):
    """How large a group is; equal on all ranks."""

    num_ranks: int  # of how many
    num_lanes: int  # see `crossfade.peers.opening.open_group`.
    buffer_bytes: int  # of each of a lane's buffers, before it is rounded up

    @property
    def lane_bytes(self) -> int:
        """Of each of a lane's buffers."""
        return align(self.buffer_bytes, SLOT_ALIGNMENT * self.num_ranks)

    @property
    def signal_bytes(self) -> int:
        """Room for signals in each rank's memory."""
        return num_words(self.num_lanes, self.num_ranks) * WORD_BYTES

    @property
    def data_bytes(self) -> int:
        """Of each rank's buffers."""
        return NUM_EPOCHS * self.num_lanes * self.lane_bytes


def open_exported(
    driver: Driver,
    block: Block,
    ranks: Sequence[Rank],
    rank: int,
    shape: Shape,
    *,
    signals_at: int,
    on_death: Callable[[str], None] | None = None,
) -> PeerGroup:
    """Opens all that the ranks share, and loads every kernel. All of them do it; no stream of this device may be waiting.

    ``block`` has this rank's buffers, `Shape.data_bytes` long, and stays the caller's; ``signals_at`` is where in each rank's
    memory its signals begin. ``on_death`` is given the name of a rank that has died, in another thread, before any stream that
    waits for it is released.
    """
    with ExitStack() as opened:
        kernels = _kernels(driver, rank, [each.device for each in ranks])
        words = num_words(shape.num_lanes, shape.num_ranks)
        boards = []
        for each in ranks:
            boards.append(HostBoard(driver, each.memory, words, each.name, signals_at))
            opened.callback(boards[-1].close)
        addresses = []
        for k, each in enumerate(ranks):
            if k == rank:
                addresses.append(block.address)
                continue
            memory = OpenedMemory(driver, each.handle, shape.data_bytes, f"buffers of {each.name}")
            opened.callback(memory.close)
            addresses.append(memory.address)
        shared = GroupMemory(driver, kernels, rank, shape.num_ranks, addresses, shape.data_bytes, boards)
        lanes = [Lane(shared, index, shape.lane_bytes) for index in range(shape.num_lanes)]
        device = device_of(driver.device)
        torch = torch_or_raise()
        memory_view = tensor_on(block.address, (shape.data_bytes,), torch.uint8, driver.device)
        give_back, names = opened.pop_all().close, [each.name for each in ranks]
        parts = OpenedGroup(shared, [each.pid for each in ranks], memory_view, give_back)
        return PeerGroup(parts, lanes, device.type, shape.data_bytes, names=names, before_release=on_death)


def check_links(kinds: Mapping[tuple[int, int], LinkKind], devices: Sequence[int]) -> None:
    """Whether signals between these devices can be trusted."""
    hint = "collectives between their actors go by NCCL: Transport.NCCL, or 'auto'; `crossfade topology` measures the links anew"
    check_pairs(kinds, permutations(dict.fromkeys(devices), 2), hint=hint)


def _kernels(driver: Driver, rank: int, devices: Sequence[int]) -> Kernels:
    if driver.device == HOST:
        host: Any = driver
        assert isinstance(host, HostDriver)
        return HostKernels(host)
    facts = read_facts()
    require(judge(facts))
    check_links(facts.links, devices)
    from crossfade.peers.triton_kernels import TritonKernels

    torch = torch_or_raise()
    kernels = TritonKernels(driver.device, rank, len(devices))
    kernels.load()
    load_kernels((torch.uint8,), driver.device)
    return kernels
