"""A graph with a collective of each kind between actors with GPUs (or CPUs in their place), and what its timelines must have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

import crossfade
from crossfade import Transport
from crossfade.collective import allgather, allreduce, broadcast, reducescatter

EVENT_US = 2.0
"""About the resolution of the time between two events, twice."""
CLOCK_US = 50.0
SIZES = (1_000, 40, 1 << 17, 1 << 23)
"""Whole numbers of eight bytes; the last is 64 MB, more than a group's buffer."""
KINDS = ("allreduce", "allgather", "reducescatter", "broadcast")


class Member:
    """Makes tensors of whole numbers and adds up what it gets."""

    def __init__(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device == "cpu":
            torch.set_num_threads(1)

    def make(self, size: int) -> Any:
        return torch.arange(size, device=self._device)

    def total(self, *values: Any) -> int:
        return int(sum(value.sum().item() for value in values))


def all_kinds(actors: Sequence[Any], **options: Any) -> Any:
    """A graph that gives, for each actor, the sum of all that it gets from a collective of each kind, the last one the root."""
    transport = options.pop("transport", "auto")
    with crossfade.InputNode() as given:
        made = [actor.make.bind(given) for actor in actors]
        found = [
            allreduce.bind(made, transport=transport),
            allgather.bind(made, transport=transport),
            reducescatter.bind(made, transport=transport),
            broadcast.bind(made, root=len(actors) - 1, transport=transport),
        ]
        outputs = [actor.total.bind(*got) for actor, got in zip(actors, zip(*found, strict=True), strict=True)]
        return crossfade.MultiOutputNode(outputs).compile(**options)


def expected(num_actors: int, size: int) -> list[int]:
    """What it gives for a size that the number of actors divides."""
    total, part = size * (size - 1) // 2, size // num_actors
    parts = [num_actors * (part * (2 * rank * part + part - 1) // 2) for rank in range(num_actors)]
    return [2 * num_actors * total + total + each for each in parts]


def on_coll(timeline: crossfade.Timeline) -> list[crossfade.Span]:
    """What collectives did, and not what they waited for."""
    return [span for span in timeline.spans if span.stream == "coll" and span.kind == "communicate"]


def least_us(kind: str, num_actors: int, size_bytes: int) -> float:
    """What a collective takes at least, somewhere: each GPU moves its share at 1 TB/s, more than eighteen links of NVLink do."""
    shares = {"allreduce": 2 * (num_actors - 1) / num_actors, "allgather": num_actors - 1, "broadcast": 1}
    return shares.get(kind, (num_actors - 1) / num_actors) * size_bytes / 1e6


def check_spans(graph: Any, sizes: Sequence[int], clock_us: float) -> None:
    """After one execution of each of these sizes: each collective has one span on each party, in order, with its bytes, and none
    ends anywhere before all have begun (but for broadcasts); predicted timelines have the same.

    Args:
        graph: of `all_kinds`.
        sizes: what was executed.
        clock_us: by how much the clocks of two actors may differ.
    """
    measured, predicted = graph.timeline(), graph.predicted_timeline(num_executions=len(sizes))
    parties = list(graph.plan.collectives[0].parties)
    wanted = [(f"coll c{k}", kind, number) for number in range(len(sizes)) for k, kind in enumerate(KINDS)]
    for timeline in (measured, predicted):
        assert {span.actor for span in on_coll(timeline)} == set(parties)
        for party in parties:
            mine = [span for span in on_coll(timeline) if span.actor == party]
            assert [(span.label, span.what, span.execution) for span in mine] == wanted
            assert all(one.end_us <= other.start_us + EVENT_US for one, other in pairwise(mine))
    spans = on_coll(measured)
    assert all(span.size_bytes == 8 * sizes[span.execution] for span in spans)
    assert all(span.end_us > span.start_us for span in spans)
    for label, kind, number in wanted:
        each = [span for span in spans if (span.label, span.execution) == (label, number)]
        if kind != "broadcast":  # who has a small tensor may be done with it before the others begin, by NCCL
            assert min(span.end_us for span in each) > max(span.start_us for span in each) - clock_us
        assert max(span.duration_us for span in each) >= least_us(kind, len(parties), 8 * sizes[number])
    for party in parties:
        runs = [
            span
            for span in measured.spans
            if (span.actor, span.stream) == (party, "compute") and span.what.endswith(".total")
        ]
        assert len(runs) == len(sizes)
        for run in runs:
            of_it = [span for span in spans if (span.actor, span.execution) == (party, run.execution)]
            assert max(span.end_us for span in of_it) <= run.start_us + EVENT_US


def open_members(num_gpus: int, num_each: int = 1) -> Iterator[list[Any]]:
    """So many actors on each of so many GPUs."""
    crossfade.init(num_gpus=num_gpus)
    yield [crossfade.remote(Member).options(num_gpus=1 / num_each).remote() for _ in range(num_gpus * num_each)]
    crossfade.shutdown()


def check_recorded(members: list[Any], transport: Any, *, overlap: bool) -> None:
    """Each collective is a span on each GPU: in order, with its bytes, as predicted, and over before the method that takes what
    comes out.
    """
    graph = all_kinds(members, transport=transport, record=True, overlap=overlap)
    assert {spec.transport for spec in graph.plan.collectives} == {transport}
    warm = [crossfade.get(graph.execute(size), timeout=120) for size in SIZES]
    assert warm == [expected(len(members), size) for size in SIZES]
    refs = [graph.execute(size) for size in SIZES]
    assert [crossfade.get(ref, timeout=120) for ref in refs] == warm
    check_spans(graph, [*SIZES, *SIZES], CLOCK_US)
    graph.teardown()


def check_unrecorded(members: list[Any]) -> None:
    """Without recording there are none."""
    graph = all_kinds(members)
    assert crossfade.get(graph.execute(1_000), timeout=120) == expected(len(members), 1_000)
    with pytest.raises(crossfade.CrossfadeError):
        graph.timeline()
    graph.teardown()


def suite(num_gpus: int, num_each: int = 1, transports: Sequence[Transport] = (Transport.COPY, Transport.NCCL)) -> type:
    """Both, for so many actors on each of so many GPUs."""

    @pytest.mark.timeout(300)
    class Suite:
        @pytest.fixture(scope="class")
        @classmethod
        def members(cls) -> Iterator[list[Any]]:
            yield from open_members(num_gpus, num_each)

        @pytest.mark.parametrize("overlap", [False, True])
        @pytest.mark.parametrize("transport", transports)
        def test_each_collective_is_a_span_on_each_gpu(self, members: list[Any], transport: Any, overlap: bool) -> None:
            check_recorded(members, transport, overlap=overlap)

        def test_without_recording_there_are_none(self, members: list[Any]) -> None:
            check_unrecorded(members)

    return Suite
