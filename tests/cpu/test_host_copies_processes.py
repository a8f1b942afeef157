"""Values between a process with a device and one without, each a real process, over memory of the host; kills of either side."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from crossfade.device.driver import HOST
from tests.helpers import host_copy_cases as cases
from tests.helpers.device_pair import run_workers

NUM_VALUES = 60


@pytest.mark.parametrize(
    ("source", "polls", "target", "onto", "depth", "num_kept"),
    [
        (HOST, True, cases.NO_DEVICE, "", 1, 2),
        (HOST, False, cases.NO_DEVICE, "", 3, 1),
        (cases.NO_DEVICE, False, HOST, "cuda", 1, 2),
        (cases.NO_DEVICE, False, HOST, "default", 3, 4),
    ],
)
def test_between_a_device_and_a_host(
    source: int, polls: bool, target: int, onto: str, depth: int, num_kept: int
) -> None:
    cases.check(NUM_VALUES, depth, (source, polls), (target, onto, "cpu", num_kept))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_writer", [True, False])
def test_a_killed_peer_leaves_nothing(seed: int, is_writer: bool) -> None:
    dies = cases.dies_reading if is_writer else cases.dies_writing
    _, survivor = run_workers([dies, cases.survives], [(1, HOST, seed), (0, HOST, is_writer)], dying={0})
    assert "worker 0 died" in survivor.pop("error")
    assert survivor == {"num_wrong": 0, "held": [], "grown": {}}
