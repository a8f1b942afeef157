"""Values arrive where they belong whatever device a program has made torch's default: `meta` stands for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.channels.values.tensors import bring_to_host  # noqa: E402
from crossfade.collective import allgather, allreduce, broadcast  # noqa: E402
from crossfade.device.borrowed import storages_hold  # noqa: E402
from tests.helpers.sessions import TORCH  # noqa: E402


class Odd:
    """Has another default device than its tensors."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.set_default_device("meta")

    def make(self, size: int) -> Any:
        return torch.arange(size, device="cpu")

    def make_sparse(self, size: int) -> Any:
        return [torch.ones(size, device="cpu").to_sparse(), torch.eye(2, device="cpu").to_sparse_csr()]

    def same(self, value: Any) -> Any:
        return value

    def total(self, value: Any) -> tuple[str, int, int]:
        return str(value.device), len(value), int(value.sum())

    def totals(self, values: list[Any]) -> list[tuple[str, int]]:
        return [(str(value.device), int(value.sum())) for value in values]


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    crossfade.init(preload=TORCH)
    yield [crossfade.remote(Odd).remote() for _ in range(2)]
    crossfade.shutdown()


@pytest.fixture
def odd_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("transport", ["shm", "gloo", "copy", "staged"])
def test_tensors_of_edges(actors: list[Any], transport: str) -> None:
    first, second = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        sparse = first.make_sparse.bind(given).with_tensor_transport(transport)
        graph = crossfade.MultiOutputNode([second.total.bind(made), second.totals.bind(sparse)]).compile()
    with graph:
        for size in (3, 0, 100_000):
            dense, (ones, eye) = crossfade.get(graph.execute(size), timeout=30)
            assert dense == ("cpu", size, size * (size - 1) // 2)
            assert (ones, eye) == (("cpu", size), ("cpu", 2))


@pytest.mark.parametrize("transport", ["gloo", "copy"])
def test_tensors_of_collectives(actors: list[Any], transport: str) -> None:
    with crossfade.InputNode() as given:
        made = [actor.make.bind(given) for actor in actors]
        results = [
            *allreduce.bind(made, transport=transport),
            *allgather.bind(made, transport=transport),
            *broadcast.bind(made, transport=transport),
        ]
        ends = [actor.total.bind(each) for each, actor in zip(results, actors * 3, strict=True)]
        graph = crossfade.MultiOutputNode(ends).compile()
    with graph:
        wanted = [("cpu", 5, 20)] * 2 + [("cpu", 10, 20)] * 2 + [("cpu", 5, 10)] * 2
        assert crossfade.get(graph.execute(5), timeout=30) == wanted


@pytest.mark.parametrize("kind", ["dense", "empty", "large", "sparse"])
def test_tensors_of_the_driver(actors: list[Any], odd_default: None, kind: str) -> None:
    size = {"empty": 0, "large": 100_000}.get(kind, 3)
    value = torch.arange(size, device="cpu")
    value = value.to_sparse() if kind == "sparse" else value
    graph = actors[0].same.bind(crossfade.InputNode()).compile()
    with graph:
        result = crossfade.get(graph.execute(value), timeout=30)
        assert (result.device.type, result.layout, result.dtype) == ("cpu", value.layout, value.dtype)
        assert result.to_dense().tolist() == value.to_dense().tolist()


def test_what_is_tried_out_or_brought_lies_on_the_host(odd_default: None) -> None:
    assert storages_hold()
    assert bring_to_host(torch.arange(3, device="cpu")).tolist() == [0, 1, 2]
