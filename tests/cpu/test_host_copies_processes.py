"""Values between a process with a device and one without, each a real process, over memory of the host; kills of either side."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from crossfade.device.driver import HOST
from tests.helpers import host_copy_cases as cases
from tests.helpers.device_pair import run_workers

NUM_VALUES = 60


@pytest.mark.parametrize(("depth", "num_kept", "polls"), [(1, 2, True), (3, 1, False)])
def test_from_a_device_to_a_host(depth: int, num_kept: int, polls: bool) -> None:
    sent, got = run_workers(
        [cases.writes, cases.reads],
        [(1, HOST, NUM_VALUES, depth, polls), (0, cases.NO_DEVICE, NUM_VALUES, depth, "", "cpu", num_kept)],
    )
    assert got == {"num_wrong": 0, "num_values": NUM_VALUES, "held": []}
    assert sent == {"held": []}


@pytest.mark.parametrize(("depth", "num_kept", "onto"), [(1, 2, "cuda"), (3, 4, "default")])
def test_from_a_host_to_a_device(depth: int, num_kept: int, onto: str) -> None:
    sent, got = run_workers(
        [cases.writes, cases.reads],
        [(1, cases.NO_DEVICE, NUM_VALUES, depth, False), (0, HOST, NUM_VALUES, depth, onto, "cpu", num_kept)],
    )
    assert got == {"num_wrong": 0, "num_values": NUM_VALUES, "held": []}
    assert sent == {"held": []}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_writer", [True, False])
def test_a_killed_peer_leaves_nothing(seed: int, is_writer: bool) -> None:
    dies = cases.dies_reading if is_writer else cases.dies_writing
    _, survivor = run_workers([dies, cases.survives], [(1, HOST, seed), (0, HOST, is_writer)], dying={0})
    assert "worker 0 died" in survivor.pop("error")
    assert survivor == {"num_wrong": 0, "held": [], "grown": {}}
