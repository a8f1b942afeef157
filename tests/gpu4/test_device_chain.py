"""Three GPUs in a chain, whose first process is killed at random moments: rubbish comes to the third, and its check finds it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.device_chain_kills import check_a_chain

NUM_KILLS = 10


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_host_that_asks_who_is_alive_takes_no_rubbish_for_a_value(seed: int) -> None:
    check_a_chain((0, 1, 2), seed)
