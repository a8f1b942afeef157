"""How the ranks of a group find each other's processes and shared memory, with nothing pickled and nothing that listens.

Each rank tells its process id and the number of a descriptor by an all-gather of integers on the group itself. The others open the
memory behind it through /proc, which the kernel allows to processes of the same user.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError
from crossfade.host.memory import Memory

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_COUNT = itertools.count(1)


class Ranks(NamedTuple):
    """One rank among several that tell each other numbers. ``gather``: gives all ranks' numbers, by rank; all give equally many."""

    rank: int
    num_ranks: int
    gather: Callable[[list[int]], list[list[int]]]

    @classmethod
    def of_group(cls, group: ProcessGroup, device: torch.device) -> Ranks:
        """The ranks of a group, which gathers numbers on such a device."""
        distributed = torch_or_raise().distributed

        rank, num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        return cls(rank, num_ranks, partial(gather, group, device))

    @classmethod
    def of_store(cls, store: Store, rank: int, num_ranks: int) -> Ranks:
        """The ranks that have a store together, in which nobody else writes: where there is no group yet."""
        numbers = itertools.count()

        def gather_by_store(own: list[int]) -> list[list[int]]:
            number = next(numbers)
            store.set(f"{number} of {rank}", " ".join(map(str, own)))
            return [[int(word) for word in store.get(f"{number} of {k}").split()] for k in range(num_ranks)]

        return cls(rank, num_ranks, gather_by_store)


class Party(NamedTuple):
    """One rank's process and shared memory, as this process has them."""

    pid: int
    memory: Memory


def meet(ranks: Ranks, memory: Memory) -> list[Party]:
    """All ranks' processes and memories, by rank. Collective. Raises a `DeviceError` if they are on several hosts."""
    parties = meet_near(ranks, memory)
    if None in parties:
        for party in parties:
            if party is not None:
                party.memory.close()
        raise DeviceError(
            "the ranks of the group are on several hosts, or in containers that do not see each other's processes",
            hint="make one group for each host: torch.distributed.new_group(ranks of this host)",
        )
    return [party for party in parties if party is not None]


def meet_near(ranks: Ranks, memory: Memory) -> list[Party | None]:
    """The processes and memories of the ranks on this host, by rank; None for those of other hosts. Collective."""
    parties: list[Party | None] = []
    try:
        for party in _find(ranks, memory):
            parties.append(party)
        ranks.gather([0])  # all have come here
    except BaseException:
        for opened in {memory, *(party.memory for party in parties if party is not None)}:
            opened.close()
        raise
    return parties


def _find(ranks: Ranks, memory: Memory) -> Iterator[Party | None]:
    own = [_host_number(), os.getpid(), memory.fd]
    for k, (host, pid, fd) in enumerate(ranks.gather(own)):
        if host == own[0]:
            yield Party(pid, memory if k == ranks.rank else _open(k, pid, fd))
        else:
            yield None


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
