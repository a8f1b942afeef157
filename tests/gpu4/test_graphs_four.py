"""Actors on four GPUs: with several GPUs each; three that push into a fourth, one after the other."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers.input_workers import LIMIT_S, InputWorker, get  # noqa: E402
from tests.helpers.sessions import opened  # noqa: E402
from tests.helpers.turn_gpu_cases import check_one_after_the_other  # noqa: E402

pytestmark = pytest.mark.timeout(300)

Remote = crossfade.remote(InputWorker)
NUMS = [(2, 2), (2, 1), (1, 2)]
SIZES = (1, 1000, 3_000_000, 7)


session = opened(num_gpus=4)


@pytest.mark.parametrize("transport", ["copy", "staged", crossfade.Transport.NCCL], ids=str)
@pytest.mark.parametrize(("num_writer", "num_reader"), NUMS)
def test_tensors_of_each_gpu_arrive_where_they_belong(
    session: None, transport: Any, num_writer: int, num_reader: int
) -> None:
    writer, reader = (Remote.options(num_gpus=num).remote() for num in (num_writer, num_reader))
    sources, targets = list(writer._info.gpus), list(reader._info.gpus)
    wanted = targets if num_writer == num_reader else targets[:1] * num_writer
    with crossfade.InputNode() as given:
        made = writer.make_on.bind(given.number, given.size, sources).with_tensor_transport(transport)
        graph = reader.look_on.bind(made, given.number).compile()
    refs: list[Any] = []
    for number in range(60):
        refs.append(graph.execute(number=number, size=SIZES[number % len(SIZES)]))
        if len(refs) == 4:
            assert get(refs.pop(0)) == [(gpu, True) for gpu in wanted]
    assert all(get(ref) == [(gpu, True) for gpu in wanted] for ref in refs)
    graph.teardown(timeout=LIMIT_S)


def test_an_input_arrives_on_the_first_gpu_of_each_actor(session: None) -> None:
    actors = [Remote.options(num_gpus=2).remote() for _ in range(2)]
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        graph = crossfade.MultiOutputNode([actor.look_on.bind([given], 7) for actor in actors]).compile()
    for size in SIZES:
        found = get(graph.execute(torch.full((size,), 7)))
        assert found == [[(actor._info.gpus[0], True)] for actor in actors]
    graph.teardown(timeout=LIMIT_S)


@pytest.mark.parametrize("overlap", [False, True])
def test_large_tensors_come_one_after_the_other(session: None, overlap: bool) -> None:
    check_one_after_the_other(1.0, overlap=overlap)
