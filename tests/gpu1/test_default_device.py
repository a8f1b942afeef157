"""Values arrive where they belong where a program, or an actor, has made the GPU torch's default device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.channels.values.tensors import bring_to_host  # noqa: E402
from crossfade.device.borrowed import storages_hold  # noqa: E402

pytestmark = pytest.mark.timeout(180)

LIMIT_S = 60


class Defaulting:
    """Makes tensors without saying where, or on the CPU, and says where they came to."""

    def __init__(self) -> None:
        torch.set_default_device("cuda")

    def make(self, size: int) -> Any:
        return torch.arange(size)

    def make_near(self, size: int) -> Any:
        return [torch.arange(size, device="cpu"), torch.eye(2, device="cpu").to_sparse()]

    def total(self, value: Any) -> tuple[str, int]:
        return value.device.type, int(value.sum())

    def totals(self, values: list[Any]) -> list[tuple[str, int]]:
        return [self.total(value) for value in values]

    def same(self, value: Any) -> Any:
        return value


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    crossfade.init(num_gpus=1)
    yield [crossfade.remote(Defaulting).options(num_gpus=0.25).remote() for _ in range(2)]
    crossfade.shutdown()


@pytest.fixture
def on_the_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("transport", ["copy", "staged", "shm"])
def test_tensors_between_actors(actors: list[Any], transport: str) -> None:
    first, second = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        near = first.make_near.bind(given).with_tensor_transport(transport)
        graph = crossfade.MultiOutputNode([second.total.bind(made), second.totals.bind(near)]).compile()
    with graph:
        for size in (3, 0, 100_000):
            (place, total), others = crossfade.get(graph.execute(size), timeout=LIMIT_S)
            wanted = size * (size - 1) // 2
            assert total == wanted
            assert place == "cuda"
            assert others == [("cpu", wanted), ("cpu", 2)]


@pytest.mark.parametrize("given_on", ["cpu", "cuda"])
@pytest.mark.parametrize("device", ["default", "cuda"])
def test_tensors_of_the_driver(actors: list[Any], on_the_gpu: None, device: str, given_on: str) -> None:
    with crossfade.InputNode() as given:
        x = given.with_tensor_transport(device=device)
        graph = crossfade.MultiOutputNode([actors[0].total.bind(x), actors[0].same.bind(x)]).compile(debug=True)
    with graph:
        for size in (3, 0, 100_000):
            value = torch.arange(size, device=given_on)
            (place, total), same = crossfade.get(graph.execute(value), timeout=LIMIT_S)
            assert total == size * (size - 1) // 2
            assert place == (given_on if device == "default" else device)
            assert (same.device.type, same.tolist()) == ("cpu", list(range(size)))


def test_what_is_brought_lies_in_pinned_memory(on_the_gpu: None) -> None:
    near = bring_to_host(torch.arange(3))
    assert (near.device.type, near.tolist(), near.is_pinned()) == ("cpu", [0, 1, 2], True)
    assert storages_hold()
