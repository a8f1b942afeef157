"""Four GPUs: two rings at the same time; a chain of three, whose first process is killed: rubbish arrives, and a check finds it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers import device_cases as cases
from tests.helpers.device_chain_kills import check_a_chain
from tests.helpers.device_pair import run_workers


def test_two_rings_at_the_same_time() -> None:
    results = run_workers(
        [cases.ring_sends, cases.ring_receives] * 2, [(0, 1, 200, 2), (1, 0, 200, 2), (2, 3, 200, 2), (3, 2, 200, 2)]
    )
    for sent, got in (results[:2], results[2:]):
        assert got["num_wrong"] == 0
        assert sent["held"] == got["held"] == []


NUM_KILLS = 10


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_host_that_asks_who_is_alive_takes_no_rubbish_for_a_value(seed: int) -> None:
    check_a_chain((0, 1, 2), seed)
