"""Two GPUs: collectives between actors in measured timelines, beside predicted ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from crossfade import Transport
from tests.helpers.collective_graphs import check_recorded, check_unrecorded, open_members


@pytest.fixture(scope="module")
def members() -> Iterator[list[Any]]:
    yield from open_members(2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", [Transport.COPY, Transport.NCCL])
def test_each_collective_is_a_span_on_each_gpu(members: list[Any], transport: Any, overlap: bool) -> None:
    check_recorded(members, transport, overlap=overlap)


@pytest.mark.timeout(300)
def test_without_recording_there_are_none(members: list[Any]) -> None:
    check_unrecorded(members)
