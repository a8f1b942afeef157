"""How many rows go from each rank to each, known on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Self

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.calls.products import all_gather
from crossfade.peers.groups import group_of

if TYPE_CHECKING:
    from crossfade.peers.groups import GroupLike


@dataclass(frozen=True, slots=True)
class Counts:
    """A matrix, the same on all ranks."""

    rows: tuple[tuple[int, ...], ...]  # ``rows[p][q]`` go from rank p to rank q
    rank: int

    @classmethod
    def even(cls, count: int, rank: int, num_ranks: int) -> Self:
        """``count`` rows from each rank to each."""
        return cls(((count,) * num_ranks,) * num_ranks, rank)

    @property
    def sent(self) -> tuple[int, ...]:
        """What goes from this rank to each."""
        return self.rows[self.rank]

    @property
    def received(self) -> tuple[int, ...]:
        """What comes to this rank from each."""
        return tuple(row[self.rank] for row in self.rows)

    @property
    def largest(self) -> int:
        """The most that goes from any rank to any; the same on all ranks."""
        return max(map(max, self.rows))

    @property
    def most_sent(self) -> int:
        """The most rows that any rank sends, those for itself too; the same on all ranks."""
        return max(map(sum, self.rows))

    @property
    def most_received(self) -> int:
        """The most rows that any rank gets, those from itself too; the same on all ranks."""
        return max(map(sum, zip(*self.rows, strict=True)))

    def turned(self) -> Counts:
        """What goes back the way it came."""
        return Counts(tuple(zip(*self.rows, strict=True)), self.rank)

    def sent_at(self) -> list[int]:
        """Where what goes to each rank begins."""
        return [0, *accumulate(self.sent)][:-1]

    def received_at(self) -> list[int]:
        """Where what comes from each rank begins."""
        return [0, *accumulate(self.received)][:-1]


def gather_counts(group: GroupLike, counts: Sequence[int]) -> list[list[int]]:
    """All ranks' counts, a row each. Collective; the host waits for it, so ask once for several operators.

    Args:
        group: whose ranks.
        counts: how many rows this rank sends to each.

    Raises:
        DeviceError: torch.distributed does not know the group.
    """
    torch, group = torch_or_raise(), group_of(group)
    own = torch.tensor(list(counts), dtype=torch.int64, device=group.device)
    every = own.new_empty(group.num_ranks * len(own))
    all_gather(group, every, own)
    return every.view(group.num_ranks, len(own)).tolist()  # type: ignore[no-any-return]
