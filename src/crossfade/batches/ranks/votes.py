"""Questions that all ranks answer, through a store: yes or no, or by numbers.

A rank that has waited too long for the others ends the votes, for all ranks at the same question: they make different numbers of
calls, or one of them does something else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_YES = 1 << 32
"""One counter has both numbers: of all answers in its lower 32 bits, of those that say yes above them."""
_OVER = "over"
"""The outcome of a question that not all ranks answer."""


class Votes:
    """One rank's answers. All ranks answer the same questions in the same order.

    Args:
        store: of torch.distributed; with a prefix of its own.
        index: of this rank, among those that vote.
        num_ranks: that vote.
        limit: how long a rank waits for the others in a vote.
        longest: and for their numbers.

    Attributes:
        is_over: there are no more votes, since a rank has waited too long, or the process that had the store has ended.
    """

    def __init__(self, store: Any, index: int, num_ranks: int, limit: timedelta, longest: timedelta) -> None:
        self.is_over = False
        self._store = store
        self._index = index
        self._num_ranks = num_ranks
        self._limit = limit
        self._longest = longest
        self._number = 0
        self._last_values = ""  # this rank's, in the store

    def vote(self, *, says_yes: bool) -> bool | None:
        """Whether a rank said yes to the question before, so that no rank waits for a slower one. The same on all ranks.

        None where there is none before, and when the votes are over. It is a few short messages, however many ranks there are.
        """
        if self.is_over:
            return None
        try:
            number = self._answer(says_yes)
            outcome = self._read(number - 1, self._limit) if number > 1 else None
        except dist.DistNetworkError:
            outcome = _OVER
        self.is_over = outcome == _OVER
        return None if outcome is None or self.is_over else outcome != "0"

    def maximum(self, values: Sequence[float]) -> list[float] | None:
        """The largest of the ranks' values, one by one. It waits for all of them. None when the votes are over."""
        if self.is_over:
            return None
        try:
            own = f"values {self._number + 1} "
            self._store.set(f"{own}{self._index}", json.dumps(list(values)))
            self.is_over = self._read(self._answer(says_yes=False), self._longest) == _OVER
            if self.is_over:
                return None
            every = [json.loads(self._store.get(f"{own}{index}")) for index in range(self._num_ranks)]
            if self._last_values:  # all have read those before they answered again
                self._store.delete_key(self._last_values)
            self._last_values = f"{own}{self._index}"
        except dist.DistNetworkError:
            self.is_over = True
            return None
        return [max(each) for each in zip(*every, strict=True)]

    def _answer(self, says_yes: bool) -> int:
        """The next question; gives its number."""
        self._number += 1
        number = self._number
        num_yes, num_answers = divmod(self._store.add(f"answers {number}", _YES * says_yes + 1), _YES)
        if num_answers == self._num_ranks:
            self._end(number, str(num_yes))
            for name in ("answers", "outcome"):  # all have read that one before they answered this question
                self._store.delete_key(f"{name} {number - 2}")
        return number

    def _read(self, number: int, limit: timedelta) -> str:
        """How many said yes to a question, in digits."""
        key = f"outcome {number}"
        try:
            self._store.wait([key], limit)
        except dist.DistNetworkError:
            raise
        except (RuntimeError, ValueError):
            self._end(number, _OVER)
        outcome: bytes = self._store.get(key)
        return outcome.decode()

    def _end(self, number: int, outcome: str) -> None:
        """Of a question, if it has none: a rank may have waited too long just when the last one answered."""
        self._store.compare_set(f"outcome {number}", "", outcome)
