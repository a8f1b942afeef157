"""What users see of GPUs where there are none: who has which, what is planned, what cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.collective import allreduce
from crossfade.topology import Device, Link, LinkKind, Topology, save_topology, topology_path


class Adder:
    def add(self, x: int) -> int:
        return x + 1


Actor = crossfade.remote(Adder)
UUIDS = ("GPU-a", "GPU-b")


@pytest.fixture(autouse=True)
def inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A session with three GPUs in one thread, and no measured topology."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    crossfade.init(engine="inline", num_gpus=3)
    yield
    crossfade.shutdown()


def keep_topology(kind: LinkKind) -> None:
    links = tuple(Link(a, b, kind) for a in UUIDS for b in UUIDS if a != b)
    topology_path().parent.mkdir(parents=True)
    save_topology(Topology(tuple(Device(uuid, "H200", 132, 10**11) for uuid in UUIDS), links))


def chain(**asked: Any) -> crossfade.CompiledGraph:
    """driver -> Adder0 -> Adder1 -> driver, on a GPU each."""
    first, second = (Actor.options(num_gpus=1).remote() for _ in range(2))
    with crossfade.InputNode() as inp:
        graph: crossfade.CompiledGraph = second.add.bind(first.add.bind(inp).with_tensor_transport(**asked)).compile()
    return graph


@pytest.mark.parametrize(
    ("asked", "transport"),
    [
        ({}, "copy"),
        ({"transport": "nccl"}, "copy"),
        ({"transport": "accelerator", "device": "gpu"}, "copy"),
        ({"transport": crossfade.Transport.NCCL}, "nccl"),
        ({"transport": "staged"}, "staged"),
        ({"device": "cpu"}, "shm"),
        ({"transport": "shm"}, "shm"),
    ],
)
def test_a_graph_between_gpus_runs_in_one_thread(asked: dict[str, Any], transport: str) -> None:
    with chain(**asked) as graph:
        assert graph.plan.devices == {"Adder0": (0,), "Adder1": (1,)}
        assert graph.plan.channel["n0"].transport == transport
        assert crossfade.parse_plan(str(graph.plan)) == graph.plan
        assert [graph.execute(value).get() for value in range(5)] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(("kind", "transport"), [(LinkKind.NVLINK, "copy"), (LinkKind.HOST, "staged")])
def test_the_measured_topology_decides(kind: LinkKind, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_topology(kind)
    with chain() as graph:
        assert graph.plan.channel["n0"].transport == transport
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8,9")  # the file knows none of these
    first, second = (Actor.options(num_gpus=0.5).remote() for _ in range(2))
    assert first._info.gpus == second._info.gpus == (2,)
    with crossfade.InputNode() as inp, second.add.bind(first.add.bind(inp)).compile() as graph:
        assert graph.plan.channel["n0"].transport == "copy"


@pytest.mark.parametrize(("kind", "transport"), [(None, "copy"), (LinkKind.NVLINK, "copy"), (LinkKind.HOST, "nccl")])
def test_the_measured_topology_decides_for_collectives(kind: LinkKind | None, transport: str) -> None:
    if kind is not None:
        keep_topology(kind)
    actors = [Actor.options(num_gpus=1).remote() for _ in range(2)]
    with crossfade.InputNode() as inp:
        output = crossfade.MultiOutputNode(allreduce.bind([actor.add.bind(inp) for actor in actors]))
    with output.compile() as graph:
        assert [spec.transport for spec in graph.plan.collectives] == [transport]
        assert f"collective c0 = allreduce(sum) over {transport}: " in str(graph.plan)
        (note,) = graph.predicted_timeline().notes
        assert note.startswith(f"allreduce (collective c0): no {transport} from GPU 0 to GPU 1 and 1 more links")


def test_what_cannot_be_had_is_said_when_the_graph_is_compiled() -> None:
    first, second = Actor.options(num_gpus=1).remote(), Actor.remote()
    for asked in ("nccl", "copy", "staged"):
        with crossfade.InputNode() as inp:
            output = second.add.bind(first.add.bind(inp).with_tensor_transport(asked))
        with pytest.raises(crossfade.GraphError, match=r"(?s)Adder0\.add\(inp\) asks for .* Adder1 has none\nhint: "):
            output.compile()
    keep_topology(LinkKind.HOST)
    third = Actor.options(num_gpus=1).remote()
    output = third.add.bind(first.add.bind(crossfade.InputNode()).with_tensor_transport("copy"))
    with pytest.raises(crossfade.GraphError, match="GPU-a and GPU-b, are not connected by NVLink but by host\nhint: "):
        output.compile()


def test_the_predicted_timeline_shows_the_streams_of_the_gpus() -> None:
    work = crossfade.Workload(device_us={"add": 100.0}, value_bytes={"n0": 4_000_000})
    with chain() as graph:
        found = graph.predicted_timeline(work, num_executions=3)
    assert {span.stream for span in found.spans if span.actor == "Adder0"} == {"main", "compute", "push"}
    assert {span.stream for span in found.spans if span.actor == "Adder1"} == {"main", "compute", "up"}
    assert found.compute_us("Adder1") >= 300.0
