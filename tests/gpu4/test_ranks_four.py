"""Ranks and processes on four GPUs: operators, every candidate against float64; collectives; rings; a chain of three."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.helpers import collective_gpu_cases, collective_graphs, ranks
from tests.helpers import device_cases as cases
from tests.helpers.device_chain_kills import check_a_chain
from tests.helpers.device_pair import run_workers
from tests.helpers.ops_cases import GPU_CASES
from tests.helpers.peer_gpu_cases import check_a_killed_rank, check_replays, check_right_values

TestOperators = ranks.suite(GPU_CASES, 4, "cuda", limit_s=300)
TestCollectivesOfActors = collective_gpu_cases.suite(4)
TestSpans = collective_graphs.suite(4)


def test_right_values(tmp_path: Path) -> None:
    check_right_values(4, str(tmp_path / "store"))


def test_replays(tmp_path: Path) -> None:
    check_replays(4, str(tmp_path / "store"))


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, 2])
def test_a_killed_rank(tmp_path: Path, dead: int, is_waiting: bool) -> None:
    check_a_killed_rank(4, str(tmp_path / "store"), dead, is_waiting=is_waiting)


def test_two_rings_at_the_same_time() -> None:
    results = run_workers(
        [cases.ring_sends, cases.ring_receives] * 2, [(0, 1, 200, 2), (1, 0, 200, 2), (2, 3, 200, 2), (3, 2, 200, 2)]
    )
    for sent, got in (results[:2], results[2:]):
        assert got["num_wrong"] == 0
        assert sent["held"] == got["held"] == []


@pytest.mark.parametrize("seed", range(10))
def test_a_host_that_asks_who_is_alive_takes_no_rubbish_for_a_value(seed: int) -> None:
    check_a_chain((0, 1, 2), seed)
