"""What is chosen where counts differ."""

from __future__ import annotations

from typing import Any

import pytest

from crossfade.ops import choice
from crossfade.ops.candidate import PLAIN, Candidate
from crossfade.ops.counts import Counts
from crossfade.ops.shape import Shape

SHAPE = Shape("matmul_all_to_all", 1000, 64, 64, "bfloat16", "nt", 2)


def choose(monkeypatch: pytest.MonkeyPatch, tuned: str, most_received: int) -> str:
    class Tuned:
        def choose(self, shape: Shape) -> Candidate:
            return Candidate.parse(tuned)

    group: Any = None
    monkeypatch.setattr(choice, "tuner_of", lambda group: Tuned())
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
        ("chunked(chunks=2)", 5000, "chunked(chunks=2)"),
    ],
)
def test_a_rank_that_gets_much_has_work_early(
    monkeypatch: pytest.MonkeyPatch, tuned: str, most_received: int, chosen: str
) -> None:
    assert choose(monkeypatch, tuned, most_received) == chosen


def test_where_there_is_nothing_to_do_nobody_is_asked() -> None:
    group: Any = None
    assert choice.choose_for(Shape("matmul_all_to_all", 0, 64, 64, "bfloat16", "nt", 2), group, 7) == PLAIN


def test_the_most_that_a_rank_gets() -> None:
    counts = Counts(((1, 2), (3, 4)), 0)
    assert (counts.most_sent, counts.most_received) == (7, 6)
