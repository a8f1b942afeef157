"""One GPU: collectives of the only actor, which give what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import crossfade
from crossfade import Transport
from tests.helpers.collective_graphs import SIZES, all_kinds, expected, open_members


@pytest.fixture(scope="module")
def members() -> Iterator[list[Any]]:
    yield from open_members(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", [Transport.COPY, Transport.NCCL])
def test_a_collective_of_one_actor(members: list[Any], transport: Any, overlap: bool) -> None:
    with all_kinds(members, transport=transport, overlap=overlap, record=True) as graph:
        refs = [graph.execute(size) for size in SIZES]
        assert [crossfade.get(ref, timeout=120) for ref in refs] == [expected(1, size) for size in SIZES]
        assert graph.timeline().spans
        assert graph.predicted_timeline().makespan_us > 0
