"""Votes of all ranks, yes or no, on a sequence of questions.

A rank reads the outcome of a question when it votes on the next one, so that no rank waits for a slower one. One that waits for too
long ends the votes, for all ranks at the same question: they make different numbers of calls.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_YES = 1 << 32
"""One counter has both numbers: of all votes in its lower 32 bits, of those that say yes above them."""
_OVER = "over"
"""The outcome of a question that not all ranks vote on."""


class Votes:
    """Casts one rank's votes. All ranks vote on the same questions in the same order.

    A vote is two or three short messages to the store, however many ranks there are.

    Args:
        store: of torch.distributed; with a prefix of its own.
        num_ranks: that vote.
        limit: how long a rank waits for the others' votes on the question before.
    """

    def __init__(self, store: Any, num_ranks: int, limit: timedelta) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._limit = limit
        self._number = 0
        self._is_over = False

    def vote(self, *, says_yes: bool) -> bool | None:
        """Votes on the next question. Gives whether a rank said yes to the one before: the same on all ranks.

        None where there was none, and when the votes are over: a rank has waited for too long, or the store is gone, whose process
        has ended and waits for nobody.
        """
        if self._is_over:
            return None
        try:
            answer = self._vote(says_yes)
        except dist.DistNetworkError:
            answer = _OVER
        self._is_over = answer == _OVER
        return None if answer in ("", _OVER) else answer != "0"

    def _vote(self, says_yes: bool) -> str:
        """How many said yes to the question before, in digits."""
        self._number += 1
        number = self._number
        num_yes, num_votes = divmod(self._store.add(f"votes {number}", _YES * says_yes + 1), _YES)
        if num_votes == self._num_ranks:
            self._end(number, str(num_yes))
            for name in ("votes", "yes"):  # all have read that answer before they voted on this question
                self._store.delete_key(f"{name} {number - 2}")
        return self._read(number - 1) if number > 1 else ""

    def _read(self, number: int) -> str:
        key = f"yes {number}"
        try:
            self._store.wait([key], self._limit)
        except dist.DistNetworkError:
            raise
        except (RuntimeError, ValueError):
            self._end(number, _OVER)
        return self._store.get(key).decode()  # type: ignore[no-any-return]

    def _end(self, number: int, outcome: str) -> None:
        """Of a question, if it has none: a rank may have waited for too long while the last one voted."""
        self._store.compare_set(f"yes {number}", "", outcome)
