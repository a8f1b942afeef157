"""Two GPUs: a collective whose result only leaves is hidden by the methods of the next executions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade import Transport  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402

NUM_EXECUTIONS, IN_FLIGHT = 40, 4
FEW, MANY = 1 << 18, 1 << 22
"""Numbers of eight bytes, 2 MB for the driver, for more would take the host longer than the products, and 32 MB for an actor."""


class Trainer:
    def __init__(self) -> None:
        self._a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def grad(self, number: int, size: int) -> Any:
        """More than a millisecond's work, ten times as long as the exchange."""
        torch.mm(self._a, self._a)
        return torch.full((size,), number, device="cuda")

    def look(self, tensor: Any) -> Any:
        return torch.stack([tensor.min(), tensor.max()])


@pytest.fixture
def trainers() -> Iterator[list[Any]]:
    crossfade.init(num_gpus=2)
    yield [crossfade.remote(Trainer).options(num_gpus=1).remote() for _ in range(2)]
    crossfade.shutdown()


def results(graph: Any) -> Iterator[Any]:
    """In order, with several executions in flight; none is kept, for slots that are kept would have to be replaced."""
    refs: list[Any] = []
    for number in range(NUM_EXECUTIONS + IN_FLIGHT):
        if number < NUM_EXECUTIONS:
            refs.append(graph.execute(number))
        if number >= IN_FLIGHT - 1 and refs:
            yield crossfade.get(refs.pop(0), timeout=60)


def check_hidden(timeline: Any, actor: str) -> None:
    """In most executions the collective was still under way when the next one's method began."""
    spans = [span for span in timeline.spans if span.actor == actor]
    over_us = {span.execution: span.end_us for span in spans if (span.stream, span.kind) == ("coll", "communicate")}
    begin_us = {span.execution: span.start_us for span in spans if span.stream == "compute"}
    ahead_us = [over_us[number] - begin_us[number + 1] for number in over_us if number + 1 in begin_us]
    assert len(ahead_us) > 5
    assert sum(each > 0 for each in ahead_us) > len(ahead_us) / 2, (ahead_us, spans[-40:])


@pytest.mark.parametrize("transport", [Transport.COPY, Transport.NCCL])
def test_a_result_for_the_driver(trainers: list[Any], transport: Any) -> None:
    with crossfade.InputNode() as given:
        sums = allreduce.bind([each.grad.bind(given, FEW) for each in trainers], transport=transport)
        graph = crossfade.MultiOutputNode(sums).compile(max_inflight=IN_FLIGHT, record=True)
    for number, found in enumerate(results(graph)):
        assert all({int(each.min()), int(each.max())} == {2 * number} for each in map(torch.Tensor.numpy, found))
    timeline = graph.timeline()
    graph.teardown()
    for actor in graph.plan.collectives[0].parties:
        check_hidden(timeline, actor)


@pytest.mark.parametrize("edge", ["copy", "staged", Transport.NCCL], ids=str)
def test_a_result_for_another_actor(trainers: list[Any], edge: Any) -> None:
    """The first actor's goes to the second one, which computes with it, and with nothing of its own."""
    with crossfade.InputNode() as given:
        sums = allreduce.bind([each.grad.bind(given, MANY) for each in trainers])
        looked = trainers[1].look.bind(sums[0].with_tensor_transport(edge))
        graph = looked.compile(max_inflight=IN_FLIGHT, record=True)
    for number, found in enumerate(results(graph)):
        assert found.tolist() == [2 * number] * 2
    timeline = graph.timeline()
    graph.teardown()
    check_hidden(timeline, graph.plan.collectives[0].parties[0])
