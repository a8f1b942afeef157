"""Candidates as text."""

from __future__ import annotations

import pytest

from crossfade.ops.candidate import Candidate


@pytest.mark.parametrize("text", ["plain", "rounds(rounds=2)", "tiles(group_rows=512, reserve_sms=0)", "a(b=-1)"])
def test_candidates_parse(text: str) -> None:
    assert str(Candidate.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Plain",
        "plain()",
        "rounds(2)",
        "rounds(rounds=2",
        "rounds(rounds=2,b=3)",
        "a(b=1, b=2)",
        "a(b=x)",
        "a (b=1)",
        "a(b=01)",
    ],
)
def test_what_is_no_candidate(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no candidate\nhint"):
        Candidate.parse(text)


def test_candidates_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="twice"):
        Candidate("a", (("b", 1), ("b", 2)))
    with pytest.raises(ValueError, match="no integer"):
        Candidate("a", (("b", True),))
    with pytest.raises(ValueError, match="no name"):
        Candidate("a b")
