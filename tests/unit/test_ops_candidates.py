"""Candidates as values, how rows are cut, and what is chosen where counts differ or torch's fused operators cannot do the call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import DeviceError
from crossfade.ops.calls.counts import Counts
from crossfade.ops.calls.job import Given, Operator, Shape
from crossfade.ops.calls.products import cut_evenly, least_rounds, require_slot
from crossfade.ops.choice import choose as choice
from crossfade.ops.choice.candidate import PARAMETERS, PLAIN, Candidate, candidates_for


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    name = draw(st.sampled_from(list(PARAMETERS)))
    parameters = {
        key: draw(st.integers(each.least, 1000)) for key, each in PARAMETERS[name].items() if draw(st.booleans())
    }
    return Candidate.of(name, **parameters)


@given(candidates())
def test_a_candidates_text_parses_to_an_equal_one(drawn: Candidate) -> None:
    assert Candidate.parse(str(drawn)) == drawn
    assert hash(Candidate.parse(str(drawn))) == hash(drawn)


def test_texts() -> None:
    assert str(PLAIN) == "plain"
    assert str(Candidate.of("rounds", rounds=3)) == "rounds(rounds=3)"
    assert Candidate.parse(" rounds ( rounds = 4 ) ") == Candidate("rounds", (("rounds", 4),))
    assert Candidate.parse("rounds") == Candidate.of("rounds", rounds=1)
    assert Candidate.parse("plain()") == PLAIN
    assert Candidate.of("rounds").arguments == {"rounds": 1, "lag": 0, "taper": 1}
    assert str(Candidate.of("rounds", lag=1)) == "rounds(rounds=1, lag=1)"
    assert str(Candidate.of("rounds", taper=3, rounds=2)) == "rounds(rounds=2, taper=3)"
    assert str(Candidate.of("rounds", lag=0, taper=1)) == "rounds(rounds=1)"
    assert Candidate.parse("rounds(rounds=2, taper=3, lag=1)").arguments == {"rounds": 2, "lag": 1, "taper": 3}
    assert Candidate.parse("rounds(rounds=2)") == Candidate.of("rounds", rounds=2, lag=0, taper=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no candidate\nhint: such as plain"),
        ("rounds(2)", r"'rounds\(2\)' is no candidate"),
        ("rounds(rounds=-1)", "is no candidate"),
        ("rounds(rounds=1", "is no candidate"),
        ("rounds(rounds=x)", "is no candidate"),
        ("Plain", "there is no candidate 'Plain'"),
        ("rounds(rounds=2, rounds=3)", "'rounds' has a parameter twice: rounds, rounds\nhint"),
        ("magic", "there is no candidate 'magic'\nhint: one of plain, rounds"),
        ("rounds(chunks=2)", "'rounds' has no parameter 'chunks'\nhint: it has rounds"),
        ("plain(chunks=2)", "'plain' has no parameter 'chunks'\nhint: it has no parameters"),
        ("rounds(taper=0)", "taper of 'rounds' is 0\nhint: 1 is the least"),
        ("tiles(rounds=1)", "there is no candidate 'tiles'"),
        ("rounds(rounds=0)", "rounds of 'rounds' is 0\nhint: 1 is the least"),
        ("chunked(chunks=2)", "there is no candidate 'chunked'"),
    ],
)
def test_texts_of_no_candidate(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Candidate.parse(text)


def group(
    num_ranks: int = 4,
    slot_bytes: int = 1 << 20,
    process_group: Any = "group",
    device_type: str = "cpu",
    *,
    is_staged: bool = False,
) -> Any:
    lane = SimpleNamespace(slot_bytes=slot_bytes)
    return SimpleNamespace(
        device_type=device_type,
        num_ranks=num_ranks,
        process_group=process_group,
        is_staged=is_staged,
        lane=lambda: lane,
    )


def names(operator: Operator, sizes: tuple[int, int, int], where: Any) -> list[str]:
    """``sizes``: rows of this rank's a, N, K."""
    rows = sizes[0] * (where.num_ranks if operator is Operator.ALL_GATHER else 1)
    shape = Shape(operator, rows, *sizes[1:], "bfloat16", "nn", where.num_ranks)
    return [str(each) for each in candidates_for(shape, where)]


def test_what_is_worth_a_try() -> None:
    shape = (512, 128, 64)
    rounds = [f"rounds(rounds={n})" for n in (1, 2, 4)]
    for operator in Operator:
        assert names(operator, shape, group()) == ["plain", *rounds]
    assert names(Operator.ALL_REDUCE, shape, group(process_group=None)) == rounds
    assert names(Operator.ALL_REDUCE, shape, group(num_ranks=1)) == ["plain"]
    assert names(Operator.ALL_REDUCE, shape, group(is_staged=True)) == ["plain"]
    assert names(Operator.ALL_REDUCE, shape, group(slot_bytes=255)) == ["plain"]
    assert names(Operator.ALL_REDUCE, shape, group(slot_bytes=256 * 50))[1:] == ["rounds(rounds=3)", "rounds(rounds=4)"]
    assert names(Operator.REDUCE_SCATTER, (128, 128, 64), group())[1:] == rounds[:2]
    assert names(Operator.ALL_GATHER, (8, 128, 64), group()) == ["plain", rounds[0]]
    assert names(Operator.ALL_TO_ALL, (0, 128, 64), group()) == ["plain", rounds[0]]


def test_rounds_with_a_lag_or_a_taper_are_for_all_reduces_whose_blocks_fit() -> None:
    tapered = ["rounds(rounds=2, lag=1)", "rounds(rounds=2, taper=3)", "rounds(rounds=2, lag=1, taper=3)"]
    assert names(Operator.ALL_REDUCE, (4096, 128, 64), group())[4:] == [*tapered, "rounds(rounds=4, lag=1)"]
    assert names(Operator.ALL_REDUCE, (1024, 128, 64), group())[4:] == tapered[:1]  # 256 rows of a rank
    assert names(Operator.ALL_REDUCE, (4096, 128, 64), group(slot_bytes=256 * 1023))[4:] == []
    assert names(Operator.REDUCE_SCATTER, (4096, 128, 64), group())[4:] == []


@given(st.integers(0, 200), st.integers(1, 50))
def test_cuts_cover_everything_once(length: int, num: int) -> None:
    parts = cut_evenly(length, num)
    assert len(parts) <= num
    assert [row for begin, end in parts for row in range(begin, end)] == list(range(length))
    assert all(begin < end for begin, end in parts)


@given(st.integers(1, 1000), st.integers(0, 300), st.integers(0, 100), st.integers(1, 9))
def test_the_parts_of_enough_rounds_fit(slot_bytes: int, length: int, row_bytes: int, rounds: int) -> None:
    if row_bytes > slot_bytes:
        with pytest.raises(DeviceError, match=f"a row of {row_bytes} bytes does not fit"):
            require_slot(slot_bytes, row_bytes, 2)
        return
    require_slot(slot_bytes, row_bytes, 2)
    least = least_rounds(slot_bytes, length, row_bytes)
    assert all((end - begin) * row_bytes <= slot_bytes for begin, end in cut_evenly(length, max(rounds, least)))
    if least > 1:
        assert any((end - begin) * row_bytes > slot_bytes for begin, end in cut_evenly(length, least - 1))


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
