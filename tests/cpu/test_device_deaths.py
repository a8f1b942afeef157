"""Three real processes in a chain, of which one is killed: no rubbish is published, and nothing stays."""

from __future__ import annotations

import pytest

from tests.helpers import chain_kills
from tests.helpers.device_pair import run_workers
from tests.helpers.footprint import names_left, shared_names

NUM_KILLS = 9


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_kill_in_a_chain_ends_all_of_it_and_leaves_nothing(seed: int) -> None:
    victim, num_slots = seed % 3, 1 + seed % 2
    before = shared_names()
    workers = [chain_kills.sources, chain_kills.relays, chain_kills.sinks]
    results = run_workers(workers, [(num_slots, victim, seed)] * 3, dying={victim})
    for survivor in (result for number, result in enumerate(results) if number != victim):
        assert f"worker {victim} died" in survivor.pop("error")
        assert survivor.pop("taken_s") < 1
        assert survivor == {"dead": [f"worker {victim}"], "is_told": [victim], "num_wrong": 0, "held": [], "grown": {}}
    assert not names_left(before)


def test_rubbish_comes_with_all_its_signals_right_and_the_check_finds_it() -> None:
    """The stream of the process in the middle was given everything before the first one died."""
    _, relay, sink = run_workers(
        [chain_kills.dies_before_it_copies, chain_kills.relays_ahead, chain_kills.sinks_rubbish], [()] * 3, dying={0}
    )
    assert sink == {"dead": ["worker 0"], "is_rubbish": True, "held": []}
    assert relay["is_told"] == [0], "the streams were let go before the ends were broken off"
    assert relay["waited_for"] == ("full[0] of ring of worker 0",)
    assert relay["held"] == []
