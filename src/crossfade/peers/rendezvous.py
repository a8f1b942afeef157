"""How the ranks of a group find each other's processes and shared memory, with nothing pickled and nothing that listens.

Each rank tells its process id and the number of a descriptor by an all-gather of integers on the group itself. The others open the
memory behind it through /proc, which the kernel allows to processes of the same user.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError
from crossfade.host.memory import Memory

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Party", "agree", "await_all", "count_off", "gather", "meet"]

_COUNT = itertools.count(1)


class Party(NamedTuple):
    """One rank's process and shared memory, as this process has them."""

    pid: int
    memory: Memory


def meet(group: ProcessGroup, device: torch.device, memory: Memory) -> list[Party]:
    """All ranks' processes and memories, by rank. Collective."""
    parties: list[Party] = []
    try:
        for party in _find(group, device, memory):
            parties.append(party)
        await_all(group, device)
    except BaseException:
        for opened in {memory, *(party.memory for party in parties)}:
            opened.close()
        raise
    return parties


def _find(group: ProcessGroup, device: torch.device, memory: Memory) -> Iterator[Party]:
    rank = torch_or_raise().distributed.get_rank(group)
    own = [_host_number(), os.getpid(), memory.fd]
    rows = gather(group, device, own)
    if any(row[0] != own[0] for row in rows):
        raise DeviceError(
            "the ranks of the group are on several hosts, or in containers that do not see each other's processes",
            hint="make one group for each host: torch.distributed.new_group(ranks of this host)",
        )
    for k, (_, pid, fd) in enumerate(rows):
        yield Party(pid, memory if k == rank else _open(k, pid, fd))


def agree(group: ProcessGroup, device: torch.device, **arguments: int) -> None:
    """Sees to it that all ranks were given the same. Collective."""
    rows = gather(group, device, list(arguments.values()))
    for name, values in zip(arguments, zip(*rows, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"the ranks' {name} differ: {', '.join(map(str, values))}\nhint: give all ranks the same")


def await_all(group: ProcessGroup, device: torch.device) -> None:
    """Waits until all ranks have come here."""
    gather(group, device, [0])


def count_off(group: ProcessGroup, device: torch.device) -> int:
    """A number that all ranks get, and that this group has not got before. Collective."""
    return gather(group, device, [next(_COUNT)])[0][
        0
    ]  # rank 0's: its process is the same as long as there is the group


def gather(group: ProcessGroup, device: torch.device, own: list[int]) -> list[list[int]]:
    """All ranks' numbers, by rank; all give equally many. Collective."""
    torch = torch_or_raise()
    row = torch.tensor(own, dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(rows, row, group=group)
    return [each.tolist() for each in rows]


def _host_number() -> int:
    """Equal for processes that run on one kernel and see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return zlib.crc32(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode())


def _open(rank: int, pid: int, fd: int) -> Memory:
    try:
        return Memory(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise DeviceError(
            f"the shared memory of rank {rank} (process {pid}) cannot be opened: {error.strerror}",
            hint="the ranks of a group must run as one user",
        ) from None
