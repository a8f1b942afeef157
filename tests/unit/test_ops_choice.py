"""What is chosen where counts differ, or where torch's fused operators cannot do the call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.ops.calls.counts import Counts
from crossfade.ops.calls.job import Given, Operator, Shape
from crossfade.ops.choice import choose as choice
from crossfade.ops.choice.candidate import PLAIN, Candidate

SHAPE = Shape("matmul_all_to_all", 1000, 64, 64, "bfloat16", "nt", 2)


def choose(monkeypatch: pytest.MonkeyPatch, tuned: str, most_received: int) -> str:
    class Tuned:
        def choose(self, shape: Shape, *, without: str) -> Candidate:
            assert without == ""
            return Candidate.parse(tuned)

    group: Any = None
    monkeypatch.setattr(choice, "chooser_of", lambda group: Tuned())
    return str(choice.choose_for(SHAPE, group, most_received))


@pytest.mark.parametrize(
    ("tuned", "most_received", "chosen"),
    [
        ("rounds(rounds=1)", 0, "rounds(rounds=1)"),
        ("rounds(rounds=1)", 1200, "rounds(rounds=1)"),
        ("rounds(rounds=1)", 1201, "rounds(rounds=4)"),
        ("rounds(rounds=2, taper=3)", 5000, "rounds(rounds=4, taper=3)"),
        ("rounds(rounds=8)", 5000, "rounds(rounds=8)"),
        ("plain", 5000, "plain"),
        ("fused", 5000, "fused"),
    ],
)
def test_a_rank_that_gets_much_has_work_early(
    monkeypatch: pytest.MonkeyPatch, tuned: str, most_received: int, chosen: str
) -> None:
    assert choose(monkeypatch, tuned, most_received) == chosen


def test_where_there_is_nothing_to_do_nobody_is_asked() -> None:
    group: Any = None
    assert choice.choose_for(Shape("matmul_all_to_all", 0, 64, 64, "bfloat16", "nt", 2), group, 7) == PLAIN


@pytest.mark.parametrize(
    ("operator", "lane", "has_bias", "without"),
    [
        (Operator.REDUCE_SCATTER, 0, False, ""),
        (Operator.REDUCE_SCATTER, 0, True, "fused"),
        (Operator.REDUCE_SCATTER, 1, False, "fused"),
        (Operator.ALL_GATHER, 0, True, ""),
        (Operator.ALL_GATHER, 2, False, "fused"),
    ],
)
def test_what_torch_would_not_do_fused_is_done_by_the_next_best_way(
    monkeypatch: pytest.MonkeyPatch, operator: Operator, lane: int, has_bias: bool, without: str
) -> None:
    torch = pytest.importorskip("torch")
    asked: list[tuple[str, str]] = []

    class Tuned:
        def choose(self, shape: Shape, *, without: str) -> Candidate:
            asked.append((shape.operator, without))
            return PLAIN

    monkeypatch.setattr(choice, "chooser_of", lambda group: Tuned())
    group: Any = SimpleNamespace(num_ranks=2)
    given = Given(torch.ones(4, 3), torch.ones(3, 2), torch.ones(2) if has_bias else None)
    assert choice.choose(operator, group, given, 4, lane) == PLAIN
    assert asked == [(operator, without)]


def test_the_most_that_a_rank_gets() -> None:
    counts = Counts(((1, 2), (3, 4)), 0)
    assert (counts.most_sent, counts.most_received) == (7, 6)
