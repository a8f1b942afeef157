"""Sessions that end in the middle of everything, hundreds of times."""

from __future__ import annotations

import random

import pytest

from tests.helpers.session_ends import USES, end_in_the_middle, num_held


@pytest.mark.timeout(900)
@pytest.mark.parametrize("by_signal", [False, True])
def test_sessions_end_in_the_middle_of_anything(by_signal: bool) -> None:
    end_in_the_middle(0, tuple(USES))
    num_before = num_held()
    for seed in range(1, 300):
        uses = random.Random(seed).choices(sorted(USES), k=3)
        end_in_the_middle(seed, tuple(uses), by_signal=by_signal)
        assert num_held(num_before) <= num_before, f"after seed {seed}"
