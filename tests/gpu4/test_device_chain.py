"""Three GPUs in a chain, whose first process is killed at random moments: rubbish comes to the third, and its check finds it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers import device_chain_kills as kills
from tests.helpers.device_pair import run_workers

NUM_KILLS = 10


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_host_that_asks_who_is_alive_takes_no_rubbish_for_a_value(seed: int) -> None:
    workers = [kills.makes_and_dies, kills.relays_ahead, kills.sinks]
    _, relay, sink = run_workers(workers, [(device, seed) for device in range(3)], dying={0})
    assert sink["is_right"] or sink["dead"] == ["worker 0"]
    assert relay.pop("is_told_first")
    for survivor in (relay, sink):
        assert survivor["held"] == []
        assert survivor["lost_bytes"] <= 0
        assert survivor["is_usable"]
