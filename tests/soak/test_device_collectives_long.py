"""Random collectives and kills for long; ``tests/cpu/test_device_collectives.py`` has a few."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="collectives need torch")

from tests.helpers.collective_workers import dies, several
from tests.helpers.device_pair import run_workers

MOMENTS = ("before its offer", "after its offer", "in an exchange")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_parties", [2, 3, 4])
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 14, 1 << 20])
def test_random_collectives_give_what_plain_torch_gives(num_parties: int, buffer_bytes: int) -> None:
    cases = [("random", seed, 5, buffer_bytes) for seed in range(100)]
    said = run_workers([several] * num_parties, [(rank, cases) for rank in range(num_parties)], timeout_s=800)
    assert [wrong for row in said for each in row for wrong in each] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_parties", [2, 3, 4])
def test_random_collectives_by_gloo_give_what_plain_torch_gives(num_parties: int) -> None:
    for seed in range(20):
        args = [(rank, [("process group", seed, 5)]) for rank in range(num_parties)]
        said = run_workers([several] * num_parties, args, timeout_s=60)
        assert [wrong for row in said for each in row for wrong in each] == [], seed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["copy", "gloo"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_ch3_when_a_party_dies_the_others_are_told(moment: str, transport: str) -> None:
    for number in range(30):
        args = [(rank, moment, 0.01 * number, transport) for rank in range(3)]
        *left, _ = run_workers([dies] * 3, args, timeout_s=60, dying={2})
        assert all("A2" in each["said"] and each["told_s"] < 2 and each["held"] == {} for each in left), (number, left)
