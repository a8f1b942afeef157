"""Votes of all ranks, yes or no, on a sequence of questions.

A rank reads the outcome of a question when it votes on the next one, so that no rank waits for a slower one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from crossfade.errors import BatchesError

_YES = 1 << 32
"""One counter has both numbers: of all votes in its lower 32 bits, of those that say yes above them."""


class Votes:
    """Casts one rank's votes. All ranks vote on the same questions in the same order.

    A vote is two or three short messages to the store, however many ranks there are.

    Args:
        store: of torch.distributed; with a prefix of its own.
        num_ranks: that vote.
        limit: how long a rank waits for the others' votes on the previous question.
    """

    def __init__(self, store: Any, num_ranks: int, limit: timedelta) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._limit = limit
        self._number = 0
        self._is_over = False

    def vote(self, *, says_yes: bool) -> bool:
        """Votes on the next question. Gives whether a rank said yes to the one before: the same on all ranks.

        Always no when the store is gone: the process that had it has ended, and waits for nobody.

        Raises:
            BatchesError: a rank did not vote on the one before in time.
        """
        if self._is_over:
            return False
        self._number += 1
        number = self._number
        try:
            num_yes, num_votes = divmod(self._store.add(f"votes {number}", _YES * says_yes + 1), _YES)
            if num_votes == self._num_ranks:
                self._store.set(f"yes {number}", str(num_yes))
                for name in ("votes", "yes"):  # all have read that answer before they voted on this question
                    self._store.delete_key(f"{name} {number - 2}")
            return number > 1 and self._read(number - 1)
        except dist.DistNetworkError:
            self._is_over = True
            return False

    def _read(self, number: int) -> bool:
        key = f"yes {number}"
        try:
            self._store.wait([key], self._limit)
        except dist.DistNetworkError:
            raise
        except (RuntimeError, ValueError):
            raise BatchesError(
                f"rank {dist.get_rank()} has waited {self._limit.total_seconds():g} s for other ranks, which have made fewer "
                "calls of this kind",
                hint="all ranks of the group make the same calls; interleave(per_shape=False) allows inputs of different shapes",
            ) from None
        return int(self._store.get(key)) > 0
