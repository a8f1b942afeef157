"""Two GPUs that two processes share each: collectives between the four, of actors and of processes without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from crossfade import Transport
from tests.helpers import collective_gpu_cases, peer_gpu_cases
from tests.helpers.collective_graphs import check_recorded, check_unrecorded, open_members

NUM_PARTIES = 4

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def members() -> Iterator[list[Any]]:
    yield from open_members(2, NUM_PARTIES // 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_each_collective_is_a_span_on_each_gpu(members: list[Any], overlap: bool) -> None:
    check_recorded(members, Transport.COPY, overlap=overlap)


def test_without_recording_there_are_none(members: list[Any]) -> None:
    check_unrecorded(members)


def test_random_collectives_give_what_plain_torch_gives() -> None:
    collective_gpu_cases.check_right_values(NUM_PARTIES, by_nccl=False)


def test_all_kinds_and_sizes() -> None:
    collective_gpu_cases.check_all_sizes(NUM_PARTIES)


def test_pl5_nobody_waits_for_a_busy_host() -> None:
    collective_gpu_cases.check_nobody_waits_for_a_busy_host(NUM_PARTIES)


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, NUM_PARTIES - 1])
def test_ch3_a_killed_party(dead: int, is_waiting: bool) -> None:
    collective_gpu_cases.check_a_killed_party(NUM_PARTIES, dead, is_waiting=is_waiting)


def test_collectives_of_ranks(tmp_path: Path) -> None:
    peer_gpu_cases.check_right_values(NUM_PARTIES, str(tmp_path / "store"))
