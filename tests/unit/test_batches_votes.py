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

from crossfade.batches.votes import Votes


def test_votes_are_over_when_the_store_is_gone() -> None:
    class Gone:
        num_asked = 0

        def add(self, key: str, value: int) -> int:
            self.num_asked += 1
            raise dist.DistNetworkError("Broken pipe")

    store = Gone()
    votes = Votes(store, 2, timedelta(seconds=1))
    assert [votes.vote(says_yes=True) for _ in range(3)] == [None] * 3
    assert store.num_asked == 1, "torch prints a warning each time"


def test_no_vote_is_left_in_the_store_but_the_last_ones() -> None:
    store = HashStore()
    votes = [Votes(store, 3, timedelta(seconds=1)) for _ in range(3)]
    for number in range(1, 20):
        with ThreadPoolExecutor(3) as ranks:
            says_yes = [number % 4 == 0 and rank == 1 for rank in range(3)]
            answers = set(ranks.map(lambda each, says: each.vote(says_yes=says), votes, says_yes))
        assert answers == {number % 4 == 1 if number > 1 else None}
    assert store.num_keys() <= 5


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_wait_for_too_long_end_the_votes_at_the_same_question(seed: int) -> None:
    """Pauses are about as long as the limit, so a rank may have waited for too long just when the last one votes."""
    store, num_ranks = HashStore(), 3

    def answers(rank: int) -> list[bool | None]:
        own, votes = random.Random(f"{seed} {rank}"), Votes(store, num_ranks, timedelta(milliseconds=10))
        said = list[bool | None]()
        for _ in range(30):
            time.sleep(own.choice([0.0, 0.0, 0.0, 0.005, 0.0095, 0.01, 0.0105]))
            said.append(votes.vote(says_yes=own.random() < 0.3))
        return said

    with ThreadPoolExecutor(num_ranks) as ranks:
        first, *others = ranks.map(answers, range(num_ranks))
    assert all(each == first for each in others), (first, others)
    is_over = [answer is None for answer in first[1:]]
    assert is_over == sorted(is_over), "once and for all"
