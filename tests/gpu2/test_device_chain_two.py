"""A chain of three processes on two GPUs, the first and the third on one: the first is killed at random moments."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.device_chain_kills import check_a_chain

NUM_KILLS = 6


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_host_that_asks_who_is_alive_takes_no_rubbish_for_a_value(seed: int) -> None:
    check_a_chain((0, 1, 0), seed)
