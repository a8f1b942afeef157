"""Two GPUs: rings, staged copies, captured graphs, and a peer that is killed while another waits for it or in a chain of three."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from crossfade.device.staged_layout import StagedLayout
from tests.helpers import device_cases as cases
from tests.helpers import device_kills as kills
from tests.helpers.device_chain_kills import check_a_chain
from tests.helpers.device_pair import run_workers


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_ring(num_slots: int) -> None:
    sent, got = run_workers([cases.ring_sends, cases.ring_receives], [(0, 1, 300, num_slots), (1, 0, 300, num_slots)])
    assert got["num_wrong"] == 0
    assert got["statistics"].num_values == sent["statistics"].num_values == 300
    assert sent["held"] == got["held"] == []
    if num_slots > 1:
        assert got["num_copied_out"] > 0


@pytest.mark.parametrize("num_chunks", [2, 16])
def test_staged(num_chunks: int) -> None:
    layout = StagedLayout(num_chunks=num_chunks, chunk_bytes=256 << 10)
    sent, got = run_workers([cases.staged_sends, cases.staged_receives], [(0, 1, 100, layout), (1, 0, 100, layout)])
    assert got["num_wrong"] == 0
    assert sent["held"] == got["held"] == []


def test_captured_replays_never_show_a_stale_value() -> None:
    num_replays = 10_000
    sent, got = run_workers(
        [cases.captured_sends, cases.captured_receives],
        [(0, 1, num_replays, 4096), (1, 0, num_replays, 4096)],
        timeout_s=90,
    )
    assert got["num_wrong"] == 0
    assert got["num_due"] == num_replays
    assert sent["held"] == got["held"] == []


@pytest.mark.parametrize("moment", kills.Moment)
@pytest.mark.parametrize(
    ("dying", "surviving", "signal"),
    [(kills.dies_sending, kills.survives_receiving, "full"), (kills.dies_receiving, kills.survives_sending, "free")],
)
def test_a_peer_that_dies_is_named_and_the_device_stays_usable(
    dying: Any, surviving: Any, signal: str, moment: kills.Moment
) -> None:
    # The one who opens the memory is always worker 0.
    sends_first = dying is kills.dies_sending
    workers = [dying, surviving] if sends_first else [surviving, dying]
    dead = 0 if sends_first else 1
    results = run_workers(workers, [(0, 1, moment), (1, 0, moment)], dying={dead})
    result = results[1 - dead]
    assert result["taken_s"] < 2
    assert result["report"].is_free
    assert any(signal in label for label in result["report"].waited_for)
    assert f"worker {dead} died" in result["error"]
    assert result["usable"]
    assert result["is_left_alone"]
    assert result["was_copying"] is (moment is kills.Moment.COPYING and dead == 1)
    assert result["held"] == []
    assert result["lost_bytes"] <= 0


NUM_KILLS = 6


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_host_that_asks_who_is_alive_takes_no_rubbish_for_a_value(seed: int) -> None:
    check_a_chain((0, 1, 0), seed)
