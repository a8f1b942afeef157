"""Runs that are compared one run late: several ranks of one store, played by one thread."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the store is torch's")

from torch._C import _DistNetworkError
from torch._C._distributed_c10d import HashStore

from crossfade.batches.ranks import following
from crossfade.batches.ranks.following import Follower, Issued, Ranks
from crossfade.errors import BatchesError

SUM: Issued = (0, "allreduce", 64)
GATHER: Issued = (1, "allgather", 0)


def followers(number: int, timeout_s: float = 0.05) -> list[Follower]:
    store = HashStore()
    return [Follower(store, tuple(range(number)), rank, timedelta(seconds=timeout_s)) for rank in range(number)]


def run(ranks: list[Follower], *orders: dict[Ranks, list[Issued]]) -> None:
    """One run on each rank, one rank behind the other."""
    for rank, order in zip(ranks, orders if len(orders) > 1 else orders * len(ranks), strict=True):
        rank.begin()
        rank.end(order)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_ranks_that_agree_go_on(number: int) -> None:
    ranks, world = followers(number), tuple(range(number))
    for _ in range(4):
        run(ranks, {world: [SUM, GATHER]})
    run(ranks, {})
    run(ranks, {world: [GATHER]})


def test_a_rank_knows_how_long_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ends its second run before rank 1 has ended its first one, and a tenth of a second passes."""
    ranks, now_s = followers(2, timeout_s=60.0), [0.0]
    first, second = ranks
    first.begin()
    first.end({(0, 1): [SUM]})
    first.begin()

    def sleep(_: float) -> None:
        now_s[0] += 0.1
        second.begin()
        second.end({(0, 1): [SUM]})

    monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    first.end({(0, 1): [SUM]})
    assert [rank.waited_s for rank in ranks] == [pytest.approx(0.1), 0.0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([SUM], "rank 0 has come to 5 collectives in all.*rank 1 to 4"),
        ([SUM, (0, "allreduce", 128)], "'batch 1, allgather'.*'batch 0, allreduce of 128 bytes'"),
        ([GATHER, SUM], "'batch 1, allgather'.*'batch 0, allreduce of 64 bytes'"),
        ([], "rank 0 has come to 5 .*rank 1 to 3"),
    ],
)
def test_ranks_that_disagree_are_both_told_in_the_next_run(other: list[Issued], said: str) -> None:
    ranks = followers(2)
    run(ranks, {(0, 1): [SUM, SUM, SUM]})
    run(ranks, {(0, 1): [SUM, GATHER]}, {(0, 1): other} if other else {})  # nothing is compared yet
    for rank in ranks:
        rank.begin()
    with pytest.raises(BatchesError, match=f"(?s)disagree in run 1.*{said}"):
        ranks[0].end({(0, 1): [SUM]})
    with pytest.raises(BatchesError, match="disagree in run 1"):
        ranks[1].end({(0, 1): [SUM]})


def test_the_others_of_a_large_group_hear_of_it() -> None:
    """Rank 1 and the one behind it see it; rank 0 looks at rank 3 only."""
    ranks, world = followers(4), (0, 1, 2, 3)
    run(ranks, {world: [SUM]}, {world: [GATHER]}, {world: [SUM]}, {world: [SUM]})
    for rank in ranks:
        rank.begin()
    with pytest.raises(BatchesError, match="disagree in run 0"):
        ranks[1].end({world: [SUM]})
    with pytest.raises(BatchesError, match=r"rank 1 has raised: the ranks disagree.*"):
        ranks[0].end({world: [SUM]})


def test_subgroups_are_compared_by_themselves() -> None:
    ranks = followers(4)
    mine = {(0, 1): [SUM, GATHER], (0, 1, 2, 3): [SUM]}
    theirs = {(2, 3): [GATHER], (0, 1, 2, 3): [SUM]}
    for _ in range(3):
        run(ranks, mine, mine, theirs, theirs)
    run(ranks, mine, mine, theirs, {**theirs, (2, 3): [GATHER, GATHER]})
    for rank in ranks:
        rank.begin()
    ranks[0].end(mine)
    with pytest.raises(BatchesError, match=r"in the group of ranks \(2, 3\)"):
        ranks[3].end(theirs)


def test_a_rank_that_is_further_on_is_compared_when_this_one_comes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2's word has runs 2 and 3 when rank 0 looks for its run 1."""
    monkeypatch.setattr(following, "_NUM_SAID", 2)
    ranks, world = followers(3), (0, 1, 2)

    def one(rank: int, issued: Issued = SUM) -> None:
        ranks[rank].begin()
        ranks[rank].end({world: [issued]})

    for rank in (0, 1, 2, 0, 1, 2, 1):
        one(rank)
    one(2, GATHER)
    with pytest.raises(BatchesError, match=r"disagree in run 2.*rank 2 has come to 3 .*rank 1 to 3"):
        one(2)
    one(0)
    assert ranks[0]._ahead.keys() == {2}
    with pytest.raises(BatchesError, match=r"disagree in run 2.*rank 0 has come to 3 .*rank 2 to 3"):
        one(0)


def test_a_rank_that_does_not_come_is_waited_for_until_the_limit() -> None:
    ranks = followers(2)
    run(ranks, {(0, 1): [SUM]})
    ranks[0].begin()
    ranks[0].end({(0, 1): [SUM]})  # rank 1 may be one run behind
    ranks[0].begin()
    with pytest.raises(BatchesError, match=r"ended run 1; 0.05 s later ranks \[1\] have not"):
        ranks[0].end({(0, 1): [SUM]})


def test_an_error_is_told_to_those_that_have_ended_the_run() -> None:
    ranks = followers(2)
    run(ranks, {(0, 1): [SUM]})
    ranks[1].begin()
    assert ranks[1].fail(KeyError("mine"), {(0, 1): [SUM]}) is None
    ranks[0].begin()
    with pytest.raises(BatchesError, match="rank 1 has raised: KeyError: 'mine'"):
        ranks[0].end({(0, 1): [SUM, SUM]})


def test_a_store_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that has it may end its program while others are in their last run."""

    def gone(*_: object) -> None:
        raise _DistNetworkError("connection reset by peer")

    ranks = followers(2)
    run(ranks, {(0, 1): [SUM]})
    monkeypatch.setattr(ranks[0], "_store", SimpleNamespace(set=gone, multi_get=gone))
    for _ in range(2):
        ranks[0].begin()
        ranks[0].end({(0, 1): [SUM]})
    assert ranks[0].fail(KeyError(), {}) is None


def test_an_error_of_all_ranks_is_no_disagreement() -> None:
    ranks = followers(2)
    run(ranks, {(0, 1): [SUM]})
    for rank in ranks:
        rank.begin()
        assert rank.fail(KeyError("ours"), {(0, 1): [SUM]}) is None
    for _ in range(3):
        run(ranks, {(0, 1): [SUM]})


def test_a_collective_that_the_others_did_not_come_to_explains_the_error_that_it_ended_with() -> None:
    ranks = followers(2)
    run(ranks, {(0, 1): [SUM]})
    ranks[0].begin()
    ranks[0].end({(0, 1): [SUM]})
    ranks[1].begin()
    cause = ranks[1].fail(RuntimeError("timed out"), {(0, 1): [SUM, GATHER]})
    assert "rank 1 has come to 3 collectives in all" in str(cause)
    ranks[0].begin()
    with pytest.raises(BatchesError, match="rank 1 has raised: the ranks disagree in run 1"):
        ranks[0].end({(0, 1): [SUM]})
