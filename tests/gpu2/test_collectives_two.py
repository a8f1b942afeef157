"""Two GPUs: collectives of actors, of processes without, and of four that share a GPU with another each; their spans."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from crossfade import Transport
from tests.helpers import collective_gpu_cases, collective_graphs, peer_gpu_cases

NUM_PARTIES = 4

TestSpansOfTwo = collective_graphs.suite(2)
TestCollectivesOfTwo = collective_gpu_cases.suite(2)
TestSpans = collective_graphs.suite(2, NUM_PARTIES // 2, [Transport.COPY])


class TestCollectives(collective_gpu_cases.suite(NUM_PARTIES, [False])):  # type: ignore[misc]
    test_a_long_computation_does_not_delay_a_gather_nor_the_host = None  # it has the GPU for itself


@pytest.mark.timeout(300)
def test_collectives_of_ranks(tmp_path: Path) -> None:
    peer_gpu_cases.check_right_values(NUM_PARTIES, str(tmp_path / "store"))
