"""Two GPUs: collectives between the processes of actors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers import collective_gpu_cases as cases

NUM_GPUS = 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_nccl", [False, True])
def test_random_collectives_give_what_plain_torch_gives(by_nccl: bool) -> None:
    cases.check_right_values(NUM_GPUS, by_nccl=by_nccl)


@pytest.mark.timeout(180)
def test_all_kinds_and_sizes() -> None:
    cases.check_all_sizes(NUM_GPUS)


def test_a_long_computation_does_not_delay_a_gather_nor_the_host() -> None:
    cases.check_overlap(NUM_GPUS)


def test_pl5_nobody_waits_for_a_busy_host() -> None:
    cases.check_nobody_waits_for_a_busy_host(NUM_GPUS)


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, NUM_GPUS - 1])
def test_ch3_a_killed_party(dead: int, is_waiting: bool) -> None:
    cases.check_a_killed_party(NUM_GPUS, dead, is_waiting=is_waiting)
