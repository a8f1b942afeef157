"""What a tuner needs of the ranks that decide together: all ranks' numbers, and rank 0's word."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import ChannelClosed, ChannelTimeout
from crossfade.peers.rendezvous import count_off, gather

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

LOOK_S = 2.0
"""How often one who waits for rank 0 looks whether all ranks live."""


class Ranks(Protocol):
    """The ranks of a group. All make the same calls in one order.

    Attributes:
        rank, num_ranks: this one, and of how many.
    """

    rank: int
    num_ranks: int

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        """All ranks' numbers, by rank. Collective."""

    def tell(self, key: str, say: Callable[[], str]) -> str:
        """What ``say`` gives on rank 0, the only one that calls it. Rank 0 waits for no other rank.

        Args:
            key: what it is about, the same on all ranks, and never used before.
            say: what to say about it.

        Raises:
            ChannelTimeout: rank 0 has said nothing about it.
        """


class Alone:
    """One rank."""

    rank = 0
    num_ranks = 1

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        """Its own numbers."""
        return [list(own)]

    def tell(self, key: str, say: Callable[[], str]) -> str:
        """What it says."""
        return say()


class GroupRanks:
    """The ranks of a torch.distributed group. Numbers go by the group's own all-gather, words by its store, which uses no GPU: so a
    captured call can hear them.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        device: torch.device,
        timeout_s: float = 300.0,
        *,
        name: str | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        distributed = torch_or_raise().distributed
        self.rank: int = distributed.get_rank(process_group)
        self.num_ranks: int = distributed.get_world_size(process_group)
        self._group = ref(process_group)  # see `PeerGroup.process_group`
        self._device = device
        self._timeout_s = timeout_s
        self._store: Any = process_group.get_group_store()  # type: ignore[attr-defined,unused-ignore]
        self._check = check
        self._prefix = f"crossfade/ops/{name or count_off(process_group, device)}"

    def gather(self, own: Sequence[int]) -> list[list[int]]:
        """All ranks' numbers, by rank. Collective, and never inside a capture. A `ChannelClosed` if the group is destroyed."""
        group = self._group()
        if group is None:
            raise ChannelClosed("the process group is destroyed", hint="make another one")
        return gather(group, self._device, list(own))

    def tell(self, key: str, say: Callable[[], str]) -> str:
        """See `Ranks`."""
        where = f"{self._prefix}/{key}"
        if self.rank == 0:
            text = say()
            self._store.set(where, text)
            return text
        limit = time.monotonic() + self._timeout_s
        while True:
            left_s = limit - time.monotonic()
            try:
                self._store.wait([where], timedelta(seconds=max(min(left_s, LOOK_S), 1e-3)))
                break
            except RuntimeError as error:  # a DistStoreError, but for file stores
                if self._check is not None:
                    self._check()
                if left_s <= LOOK_S:
                    raise ChannelTimeout(
                        f"rank 0 has said nothing about '{key}' in {self._timeout_s:g} s "
                        f"({str(error).partition(chr(10))[0]:.80})",
                        hint="all ranks call the same operators, with equal shapes",
                    ) from None
        found: bytes = self._store.get(where)
        return found.decode()
