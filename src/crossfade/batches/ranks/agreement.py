"""Ranks that compare what they are about to do, and what they have done, through the store of their process group.

A collective cannot find out that the ranks disagree about collectives: it would hang, or be one of those they disagree about. The
store is there before any communicator, and a rank that raises can leave its error in it for those that wait.

In the first run of a kind each collective is compared before it starts; every run is compared as a whole, one run late
(`crossfade.batches.ranks.following`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist

from crossfade.batches.carriers.process_groups import timeout_of
from crossfade.batches.ranks.following import Follower, Issued, Ranks
from crossfade.batches.ranks.votes import Votes
from crossfade.errors import BatchesError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_COUNTS: dict[tuple[str, Ranks], Iterator[int]] = {}
"""Of agreements in the group of this name and these ranks, which make them in one order. They go on where a group is made anew: its
store may be the one of before.
"""

_MOST_WAITED = timedelta(seconds=5)
"""How long a rank waits for the others in a vote, at most: without the vote, the choice stays."""


class Agreement:
    """One rank's side of comparisons within a process group and its subgroups.

    Args:
        group: of all that compare; None for the default one.
        timeout_s: how long a rank waits for the others; None for as long as collectives of the group may take.
    """

    def __init__(self, group: ProcessGroup | None, timeout_s: float | None) -> None:
        inside: Any = dist.distributed_c10d
        group = group if group is not None else inside._get_default_group()
        self._group = ref(group)  # see `crossfade.peers.group.PeerGroup.process_group`
        self._limit = timeout_of(group) if timeout_s is None else timedelta(seconds=timeout_s)
        self._ranks: Ranks = tuple(dist.get_process_group_ranks(group))
        name = inside._world.pg_names[group]
        number = next(_COUNTS.setdefault((name, self._ranks), itertools.count()))
        self._store = inside.PrefixStore(f"crossfade.batches {name} {number}", inside._world.pg_map[group][1])
        self._numbers: dict[Ranks, int] = {}  # of comparisons, within and between runs
        self._epoch = 0  # counts runs, and the times between them: equal on all ranks, whatever each has compared
        self._last_keys: dict[Ranks, str] = {}  # in the store, by this rank; deleted when it writes the next one
        self._num_votes = itertools.count()
        self._follower = Follower(self._store, self._ranks, dist.get_rank(), self._limit)

    @property
    def group(self) -> ProcessGroup:
        """A `BatchesError` if it is destroyed."""
        group = self._group()
        if group is None or not self.has_group:
            raise BatchesError(
                "the process group of the earlier calls is destroyed", hint="interleave the module again"
            )
        return group

    @property
    def has_group(self) -> bool:
        """Whether it is not destroyed."""
        inside: Any = dist.distributed_c10d
        return self._group() in inside._world.pg_map

    @property
    def waited_s(self) -> float:
        """How long this rank has waited for others at the ends of runs, in all."""
        return self._follower.waited_s

    def is_of_all(self, group: ProcessGroup | None) -> bool:
        """Whether all ranks that compare are in a group; None is their own."""
        return group is None or set(self._ranks) <= set(dist.get_process_group_ranks(group))

    def compare(self, own: str, group: ProcessGroup | None = None) -> None:
        """Sees to it that all ranks of the group, or of the given subgroup, say the same. All of them call it, in one order.

        A group with others in it than those that compare is left out: they do not come here.

        Raises:
            BatchesError: they do not, or one of them does not come in time.
        """
        ranks = tuple(dist.get_process_group_ranks(group or self.group))
        if not set(ranks) <= set(self._ranks):
            return
        number = self._numbers[ranks] = self._numbers.get(ranks, -1) + 1
        place, me = f"{ranks} {self._epoch} {number} ", dist.get_rank()
        self._store.set(f"{place}{me}", own)
        try:
            self._store.wait([f"{place}{rank}" for rank in ranks], self._limit)
        except (RuntimeError, ValueError):
            raise BatchesError(
                f"the ranks disagree: rank {me} comes to '{own}'; after {self._limit.total_seconds():g} s others of {ranks} have "
                "come to nothing",
                hint="each rank has to issue the same collectives in the same order, also without crossfade",
            ) from None
        said = {rank: self._store.get(f"{place}{rank}").decode() for rank in ranks if rank != me}
        if (before := self._last_keys.get(ranks)) is not None:
            self._store.delete_key(before)  # all have read it: they have come to the next one
        self._last_keys[ranks] = f"{place}{me}"
        for rank, other in said.items():
            if other != own:
                raise BatchesError(
                    f"the ranks disagree: rank {me} comes to '{own}', rank {rank} to '{other}'",
                    hint="the ranks' inputs or control flow differ; interleave(per_shape=False) allows inputs of different shapes",
                )

    def votes(self) -> Votes:
        """A new sequence of questions to vote on. All ranks call this in one order."""
        inside: Any = dist.distributed_c10d
        store = inside.PrefixStore(f"votes {next(self._num_votes)}", self._store)
        index = self._ranks.index(dist.get_rank())
        return Votes(store, index, len(self._ranks), min(self._limit, _MOST_WAITED), self._limit)

    @contextmanager
    def following(self, order: Mapping[ProcessGroup | None, Sequence[Issued]]) -> Iterator[None]:
        """A run is inside, which notes its collectives by their group (None: this one). It is compared when the next one ends.

        An error is told to the ranks that wait in `compare`, or have ended the run, which raise in their turn.
        """
        self._begin_epoch()
        self._follower.begin()
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be what has failed
                for ranks in {self._ranks, *self._last_keys}:
                    place = f"{ranks} {self._epoch} {self._numbers.get(ranks, -1) + 1} "
                    self._store.set(f"{place}{dist.get_rank()}", f"{type(error).__name__}: {error}")
            cause = self._follower.fail(error, self._by_ranks(order))
            if cause is not None:
                raise cause from error
            raise
        finally:
            self._begin_epoch()
        self._follower.end(self._by_ranks(order))

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._numbers = {}

    def _by_ranks(self, order: Mapping[ProcessGroup | None, Sequence[Issued]]) -> dict[Ranks, list[Issued]]:
        found: dict[Ranks, list[Issued]] = {}
        for group, issued in order.items():
            ranks = self._ranks if group is None else tuple(dist.get_process_group_ranks(group))
            found.setdefault(ranks, []).extend(issued)
        return found


def line_up(group: ProcessGroup, device: str) -> None:
    """What is enqueued from here on begins when all ranks have come here. A GPU waits, and its CPU does not. Collective."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def maximum(values: Sequence[float], group: ProcessGroup, device: str) -> list[float]:
    """The largest of the ranks' values, one by one: the slowest rank's time counts. Collective."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return [float(each) for each in tensor.tolist()]
