"""What 'auto' takes between GPUs that nobody has measured: an actor tells how they are linked. CPUs stand for the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade import Transport  # noqa: E402
from crossfade.api import links  # noqa: E402
from crossfade.api import session as sessions  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402
from crossfade.device import capabilities  # noqa: E402
from crossfade.topology import Device, Link, LinkKind, Topology, save_topology  # noqa: E402
from tests.helpers.sessions import TORCH  # noqa: E402

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs, whose links are what they are"),
]
torch.set_num_threads(1)


def host(kind: LinkKind) -> Topology:
    names = ("GPU-a", "GPU-b")
    ends = (names, names[::-1])
    return Topology(
        tuple(Device(name, "made up", 100, 1 << 30) for name in names), tuple(Link(*end, kind) for end in ends)
    )


class Worker:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.num_asked = 0

    def see(self, kind: LinkKind | None) -> None:
        """From now on this process finds such a host; with None it has no way to find out."""

        def read() -> Topology:
            self.num_asked += 1
            if kind is None:
                raise crossfade.MissingDependency("cuda-bindings", extra="gpu", needed_for="GPUs")
            return host(kind)

        capabilities.read_topology = read
        self.num_asked = 0

    def asked(self) -> int:
        return self.num_asked

    def make(self, size: int) -> Any:
        return torch.arange(size)

    def total(self, value: Any) -> int:
        return int(value.sum())


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    crossfade.init(num_gpus=2, preload=TORCH)
    yield [crossfade.remote(Worker).options(num_gpus=1).remote() for _ in range(2)]
    crossfade.shutdown()


@pytest.fixture
def pair(actors: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Any]:
    """Nobody has asked them yet."""
    monkeypatch.setenv("CROSSFADE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(links, "num_visible_gpus", lambda: 2)
    monkeypatch.setattr(sessions.require(), "links", None)
    return actors


def transport_of(pair: list[Any], asked: Any = "auto") -> Transport:
    """That of the edge between them, over which a value went."""
    first, second = pair
    graph = second.total.bind(first.make.bind(crossfade.InputNode()).with_tensor_transport(asked)).compile()
    assert graph.execute(100).get(timeout=30) == 4950
    (spec,) = (spec for spec in graph.plan.channels if spec.value == "n0")
    graph.teardown()
    transport: Transport = spec.transport
    return transport


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (LinkKind.NVLINK, Transport.COPY),
        (LinkKind.PCIE, Transport.STAGED),
        (LinkKind.HOST, Transport.STAGED),
        (None, Transport.COPY),
    ],
)
def test_an_actor_is_asked_once(pair: list[Any], kind: LinkKind | None, wanted: Transport) -> None:
    crossfade.get([each.see.remote(kind) for each in pair])
    for asked in ("auto", "accelerator"):
        assert transport_of(pair, asked) is wanted
    assert sum(crossfade.get([each.asked.remote() for each in pair])) == 1


def test_copies_that_do_not_reach_are_refused_and_collectives_take_nccl(pair: list[Any]) -> None:
    crossfade.get([each.see.remote(LinkKind.PCIE) for each in pair])
    with pytest.raises(crossfade.GraphError, match="not connected by NVLink but by pcie"):
        transport_of(pair, "copy")
    with crossfade.InputNode() as size:
        sums = allreduce.bind([each.make.bind(size) for each in pair])
        with pytest.raises(crossfade.CrossfadeError, match="nccl"):  # which these CPUs do not have
            crossfade.MultiOutputNode(sums).compile()


def test_what_was_measured_is_believed(pair: list[Any]) -> None:
    save_topology(host(LinkKind.PCIE))
    crossfade.get([each.see.remote(LinkKind.NVLINK) for each in pair])
    assert transport_of(pair) is Transport.STAGED
    assert sum(crossfade.get([each.asked.remote() for each in pair])) == 0


def test_one_gpu_needs_no_links(pair: list[Any]) -> None:
    crossfade.get([each.see.remote(None) for each in pair])
    first, _ = pair
    graph = first.total.bind(first.make.bind(crossfade.InputNode())).compile()
    assert graph.execute(100).get(timeout=30) == 4950
    assert sum(crossfade.get([each.asked.remote() for each in pair])) == 0
    assert sessions.require().links is None
