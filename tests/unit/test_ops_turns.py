"""How sums in turns are cut and ordered (`crossfade.ops.algorithms.schedule`, `crossfade.ops.calls.products`); no torch."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.ops.calls.products import in_order, place, shares

OTHERS, OWN = False, True


def test_turns_in_words() -> None:
    assert in_order(1, 0) == [(0, OTHERS), (0, OWN)]
    assert in_order(3, 0) == [(0, OTHERS), (0, OWN), (1, OTHERS), (1, OWN), (2, OTHERS), (2, OWN)]
    assert in_order(3, 1) == [(0, OTHERS), (1, OTHERS), (0, OWN), (2, OTHERS), (1, OWN), (2, OWN)]
    assert in_order(3, 2) == [(0, OTHERS), (1, OTHERS), (2, OTHERS), (0, OWN), (1, OWN), (2, OWN)]
    assert in_order(3, 2) == in_order(3, 9)


@given(st.integers(1, 12), st.integers(0, 14))
def test_each_turn_comes_once_and_behind_what_it_needs(num_rounds: int, lag: int) -> None:
    found = in_order(num_rounds, lag)
    assert sorted(found) == [(number, is_own) for number in range(num_rounds) for is_own in (OTHERS, OWN)]
    for kind in (OTHERS, OWN):  # steps are announced, and waited for, one after the other
        assert [number for number, is_own in found if is_own is kind] == list(range(num_rounds))
    for number in range(num_rounds):
        behind = [each for each, is_own in found[: found.index((number, OWN))] if is_own is OTHERS]
        assert len(behind) == min(number + lag, num_rounds - 1) + 1  # its own round's, and so many more


def test_shares_fall_from_round_to_round() -> None:
    assert shares(1, 3) == [1]
    assert shares(3, 1) == [1, 1, 1]
    assert shares(3, 2) == [4, 2, 1]
    assert shares(2, 3) == [3, 1]


@pytest.mark.parametrize(
    ("length", "part", "whole", "at"),
    [(0, 1, 2, 0), (10, 1, 3, 3), (10, 3, 3, 10), (2048, 3, 4, 1536), (2048, 1, 3, 640), (511, 1, 2, 255)],
)
def test_rounds_begin_between_tiles_where_they_are_long_enough(length: int, part: int, whole: int, at: int) -> None:
    assert place(length, part, whole) == at


@given(st.integers(0, 20_000), st.integers(1, 8), st.integers(1, 4))
def test_the_rounds_of_a_block_are_all_of_it(length: int, num_rounds: int, taper: int) -> None:
    ends = [0, *accumulate(shares(num_rounds, taper))]
    rows = [place(length, each, ends[-1]) for each in ends]
    assert (rows[0], rows[-1]) == (0, length)
    lengths = [end - begin for begin, end in pairwise(rows)]
    assert min(lengths) >= 0
    if length >= 256 * ends[-1]:
        assert min(lengths) > 0
        assert all(row % 128 == 0 for row in rows[:-1])
