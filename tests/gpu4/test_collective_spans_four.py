"""Four GPUs: collectives between actors in measured timelines, beside predicted ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import crossfade
from tests.helpers.collective_graphs import Member, all_kinds, check_spans, expected

NUM_GPUS = 4
CLOCK_US = 50.0
SIZES = (1_000, 40, 1 << 17, 1 << 23)
"""Whole numbers of eight bytes; the last is 64 MB, more than a group's buffer."""


@pytest.fixture(scope="module")
def members() -> Iterator[list[Any]]:
    crossfade.init(num_gpus=NUM_GPUS)
    yield [crossfade.remote(Member).options(num_gpus=1).remote() for _ in range(NUM_GPUS)]
    crossfade.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", [crossfade.Transport.COPY, crossfade.Transport.NCCL])
def test_each_collective_is_a_span_on_each_gpu(members: list[Any], transport: Any, overlap: bool) -> None:
    """In order, with its bytes, as predicted, and over before the method that takes what comes out."""
    graph = all_kinds(members, transport=transport, record=True, overlap=overlap)
    assert {spec.transport for spec in graph.plan.collectives} == {transport}
    warm = [crossfade.get(graph.execute(size), timeout=120) for size in SIZES]
    assert warm == [expected(NUM_GPUS, size) for size in SIZES]
    refs = [graph.execute(size) for size in SIZES]
    assert [crossfade.get(ref, timeout=120) for ref in refs] == warm
    check_spans(graph, [*SIZES, *SIZES], CLOCK_US)
    graph.teardown()


@pytest.mark.timeout(300)
def test_without_recording_there_are_none(members: list[Any]) -> None:
    graph = all_kinds(members)
    assert crossfade.get(graph.execute(1_000), timeout=120) == expected(NUM_GPUS, 1_000)
    with pytest.raises(crossfade.CrossfadeError):
        graph.timeline()
    graph.teardown()
