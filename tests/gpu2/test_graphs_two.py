"""Two GPUs: objects that hold tensors, several readers, side streams; an actor with both GPUs; pushes one after another."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers import input_workers as cases  # noqa: E402
from tests.helpers.input_workers import GPU, LIMIT_S, InputWorker, get  # noqa: E402
from tests.helpers.turn_gpu_cases import check_one_after_the_other  # noqa: E402

pytestmark = pytest.mark.timeout(300)

Remote = crossfade.remote(InputWorker)
TRANSPORTS = ["copy", "staged", crossfade.Transport.NCCL]


@pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
def test_several_readers_on_another_gpu_and_none(session: None, transport: Any) -> None:
    writer, *readers = [Remote.options(num_gpus=share).remote() for share in (1, 0.5, 0.5)]
    cases.fan_out(writer, readers, Remote.remote(), transport)


@pytest.mark.parametrize("transport", TRANSPORTS, ids=str)
def test_side_streams_and_static_shapes_beside_dynamic_ones(session: None, transport: Any) -> None:
    writer, reader = [Remote.options(num_gpus=1).remote() for _ in range(2)]
    cases.aside(writer, reader, transport, 300)
    cases.beside_each_other(writer, reader, transport)


def test_each_reader_has_an_input_on_its_own_gpu(session: None) -> None:
    readers = [Remote.options(num_gpus=1).remote() for _ in range(2)]
    cases.late_inputs(readers, 200, overlap=True)
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        graph = crossfade.MultiOutputNode([actor.where.bind(given) for actor in readers]).compile()
    for size in (1, 3_000_000, 5):
        assert get(graph.execute(torch.ones(size))) == [[(GPU, size)]] * 2
    graph.teardown(timeout=LIMIT_S)


def test_an_actor_with_both_gpus_and_the_host(session: None) -> None:
    """Inputs come to its first GPU, what it makes on either leaves, and CPU tensors may be brought to the second one by itself."""
    both, off = Remote.options(num_gpus=2).remote(), Remote.remote()
    gpus = list(both._info.gpus)
    with crossfade.InputNode() as given:
        x = given.x.with_tensor_transport(device="cuda")
        made = both.make_on.bind(given.number, given.size, gpus)
        outputs = [both.where.bind(x), off.look_on.bind(made, given.number), made]
        graph = crossfade.MultiOutputNode(outputs).compile()
    assert graph.plan.devices == {both._info.id: tuple(gpus)}
    for number, size in enumerate((1, 1000, 1_000_000, 3)):
        found, seen, values = get(graph.execute(x=torch.ones(size), number=number, size=size))
        assert (found, seen) == ([(GPU, size)], [(None, True)] * 2)
        for place, value in enumerate(values):
            assert value.device.type == "cpu"
            assert bool((value == number + place).all())
    graph.teardown(timeout=LIMIT_S)


def test_a_slot_is_not_filled_again_while_the_second_gpu_reads_from_it(session: None) -> None:
    both = Remote.options(num_gpus=2).remote()
    output = both.bring_to.bind(crossfade.InputNode(), both._info.gpus[1])
    cases.brought_by_itself(output, 100)


@pytest.mark.parametrize("overlap", [False, True])
def test_large_tensors_come_one_after_the_other(session: None, overlap: bool) -> None:
    check_one_after_the_other(0.3, overlap=overlap)
