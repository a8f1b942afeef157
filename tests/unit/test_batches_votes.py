"""Votes of ranks that are threads here, with a store of their own."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="batches are torch's")

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from crossfade.batches.ranks.votes import Votes

LIMITS = timedelta(seconds=1), timedelta(seconds=2)


def test_votes_are_over_when_the_store_is_gone() -> None:
    class Gone:
        num_asked = 0

        def add(self, key: str, value: int) -> int:
            self.num_asked += 1
            raise dist.DistNetworkError("Broken pipe")

    store = Gone()
    votes = Votes(store, 0, 2, *LIMITS)
    assert [votes.vote(says_yes=True) for _ in range(3)] == [None] * 3
    assert votes.maximum([1.0]) is None
    assert store.num_asked == 1, "torch prints a warning each time"


def test_no_vote_is_left_in_the_store_but_the_last_ones() -> None:
    store = HashStore()
    votes = [Votes(store, rank, 3, *LIMITS) for rank in range(3)]
    for number in range(1, 20):
        with ThreadPoolExecutor(3) as ranks:
            says_yes = [number % 4 == 0 and rank == 1 for rank in range(3)]
            answers = set(ranks.map(lambda each, says: each.vote(says_yes=says), votes, says_yes))
        assert answers == {number % 4 == 1 if number > 1 else None}
    assert store.num_keys() <= 5


def test_no_values_are_left_in_the_store_but_the_last_ones() -> None:
    store = HashStore()
    votes = [Votes(store, rank, 3, *LIMITS) for rank in range(3)]
    for number in range(1, 20):
        with ThreadPoolExecutor(3) as ranks:
            values = [[number + rank, number - rank, float("inf")] for rank in range(3)]
            answers = list(ranks.map(lambda each, own: each.maximum(own), votes, values))
            assert answers == [[number + 2, number, float("inf")]] * 3
            yes = list(ranks.map(lambda each: each.vote(says_yes=True), votes))
            assert yes == [False] * 3, "of the question before, which was of values"
    assert store.num_keys() <= 5 + 3


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_wait_for_too_long_end_the_votes_at_the_same_question(seed: int) -> None:
    """Pauses are about as long as the limit, so a rank may have waited for too long just when the last one answers."""
    store, num_ranks = HashStore(), 3
    shared = random.Random(seed)
    asks_values = [shared.random() < 0.3 for _ in range(30)]

    def answers(rank: int) -> list[object]:
        own, votes = (
            random.Random(f"{seed} {rank}"),
            Votes(store, rank, num_ranks, timedelta(milliseconds=10), timedelta(milliseconds=12)),
        )
        said = list[object]()
        for asks in asks_values:
            time.sleep(own.choice([0.0, 0.0, 0.0, 0.0, 0.005, 0.0095, 0.01, 0.0105]))
            said.append(votes.maximum([own.random()]) if asks else votes.vote(says_yes=own.random() < 0.3))
            said.append(votes.is_over)
        return said

    with ThreadPoolExecutor(num_ranks) as ranks:
        first, *others = ranks.map(answers, range(num_ranks))
    assert all(each == first for each in others), (first, others)
    answered, is_over = first[::2], first[1::2]
    assert is_over == sorted(is_over, key=bool), "once and for all"
    assert all(answer is None for answer, over in zip(answered, is_over, strict=True) if over)
