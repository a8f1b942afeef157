"""Graphs of actors that claim GPUs, with the CPU in their place: what is chosen, timelines of devices, collectives."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402
from crossfade.collectives.group import Group  # noqa: E402
from crossfade.errors import DeviceError  # noqa: E402
from tests.helpers.collective_graphs import Member, all_kinds, check_spans  # noqa: E402
from tests.helpers.collective_graphs import expected as wanted_sums  # noqa: E402
from tests.helpers.copy_graphs import Worker, chain, expected, run  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs"),
    pytest.mark.usefixtures("torn_down"),
]


class Looking(Worker):
    """Knows whether it has looked for exchanges to enqueue."""

    _has_looked = False

    def note_looks(self) -> None:
        """From now on: whether it was seen to it, since the last method, that exchanges are enqueued."""
        enqueue_all = Group.enqueue_all

        def noted(group: Group) -> None:
            self._has_looked = True
            enqueue_all(group)

        Group.enqueue_all = noted  # type: ignore[method-assign, assignment]

    def has_looked(self, *_: Any) -> bool:
        has_looked, self._has_looked = self._has_looked, False
        return has_looked

    def make_looking(self, size: int) -> Any:
        return torch.full((3,), int(self.has_looked()))

    def looks(self, value: Any) -> Any:
        return value.tolist(), self.has_looked()


Remote = crossfade.remote(Looking)


@pytest.fixture(scope="module")
def gpu_actors(session: None) -> list[Any]:
    """Actors with a GPU each, which a machine without any does not have."""
    return [Remote.options(num_gpus=1, name=name).remote() for name in ("above", "below", "last")]


def test_gpus_that_the_session_claims_and_the_machine_lacks_are_the_cpu(gpu_actors: list[Any]) -> None:
    first, second, third = gpu_actors
    graph = third.total.bind(second.double.bind(first.make.bind(crossfade.InputNode()))).compile()
    assert [spec.transport for spec in graph.plan.channels] == ["shm", "copy", "copy", "shm"]
    assert graph.execute(100).get(timeout=30) == 9900


def transfers(timeline: crossfade.Timeline) -> set[tuple[str, str, str]]:
    """What moved on which streams besides the hosts' main ones."""
    hosts = ("main", "get")
    return {(s.actor, s.stream, s.label) for s in timeline.spans if s.kind == "communicate" and s.stream not in hosts}


def test_a_measured_timeline_has_the_spans_of_devices(gpu_actors: list[Any]) -> None:
    first, second, _ = gpu_actors
    graph = second.total.bind(first.make.bind(crossfade.InputNode())).compile(record=True)
    for _ in range(3):
        assert crossfade.get(graph.execute(100_000), timeout=30) == 4999950000
    spans = [span for span in graph.timeline().spans if span.stream in ("compute", "push")]
    assert [(span.actor, span.stream, span.label, span.execution) for span in spans if span.execution == 1] == [
        ("above", "compute", "run n0", 1),
        ("above", "push", "write n0", 1),
        ("below", "compute", "run n1", 1),
    ]
    assert transfers(graph.predicted_timeline()) == transfers(graph.timeline()) == {("above", "push", "write n0")}


def test_a_measured_timeline_has_the_chunks_on_their_way_up_and_down(gpu_actors: list[Any]) -> None:
    first, second, _ = gpu_actors
    with crossfade.InputNode() as given:
        graph = second.total.bind(first.make.bind(given).with_tensor_transport("staged")).compile(record=True)
    for _ in range(3):
        assert crossfade.get(graph.execute(100_000), timeout=30) == 4999950000
    moved = {("above", "up", "send n0"), ("below", "down", "recv n0")}
    assert transfers(graph.predicted_timeline()) == transfers(graph.timeline()) == moved
    for party, stream, _ in moved:
        assert f"on {party}'s stream {stream}" in str(graph.plan)
    graph.teardown()


def test_what_leaves_for_the_host_and_what_is_wanted_on_a_gpu_is_predicted_and_measured(gpu_actors: list[Any]) -> None:
    first, second, _ = gpu_actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport("shm")
        graph = second.double.bind(made).compile(record=True)
    for number in range(3):
        assert crossfade.get(graph.execute(1000 + number), timeout=30).numel() == 1000 + number
    predicted = graph.predicted_timeline(crossfade.Workload(device_us={"make": 10.0, "double": 10.0}))
    moved = {("above", "up", "write n0"), ("below", "down", "read n0"), ("below", "up", "write n1")}
    assert transfers(predicted) == transfers(graph.timeline()) == moved
    spans = [span for span in graph.timeline().spans if span.stream in ("up", "down")]
    assert len(spans) == 9
    assert all(span.size_bytes == 8 * (1000 + span.execution) for span in spans)
    graph.teardown()


def test_two_readers_on_one_gpu_get_a_copy_each_and_the_plan_says_so(session: None) -> None:
    writer, *readers = [Remote.options(num_gpus=share).remote() for share in (1, 0.5, 0.5)]
    with crossfade.InputNode() as given:
        made = writer.make.bind(given)
        outputs = [reader.total.bind(made) for reader in readers]
        graph = crossfade.MultiOutputNode(outputs).compile(record=True, buffer_bytes=1 << 20)
    source, one, other = graph.plan.devices
    assert graph.plan.devices[one] == graph.plan.devices[other] != graph.plan.devices[source]
    for _ in range(2):
        assert crossfade.get(graph.execute(1000), timeout=30) == [499_500] * 2
    said = [line for line in str(graph.plan).splitlines() if line.startswith("# n0: ") and "2 slots of 1.0 MiB" in line]
    assert [one in line for line in said] == [True, False]
    for timeline, size_bytes in ((graph.timeline(), 8000), (graph.predicted_timeline(num_executions=2), 0)):
        pushed = [span for span in timeline.spans if span.stream == "push" and span.kind == "communicate"]
        assert [(span.execution, span.size_bytes) for span in pushed] == [(n, size_bytes) for n in (0, 0, 1, 1)]
    graph.teardown()
    for actor in (writer, *readers):
        crossfade.kill(actor)


@pytest.mark.parametrize("transport", ["copy", "staged"])
def test_a_reader_may_want_all_tensors_on_its_gpu_by_every_transport(gpu_actors: list[Any], transport: str) -> None:
    first, second, third = gpu_actors
    with crossfade.InputNode() as given:
        packed = first.pack.bind(given).with_tensor_transport(transport, device="cuda")
        graph = crossfade.MultiOutputNode([second.describe.bind(packed), third.describe.bind(packed)]).compile()
    assert "device=cuda" in str(graph.plan)
    for size in (5, 3000, 0):
        assert crossfade.get(graph.execute(size), timeout=30) == [("x" * size, list(range(size)), True, None)] * 2
    graph.teardown()


def test_nccl_says_that_it_needs_gpus(gpu_actors: list[Any]) -> None:
    first, second, _ = gpu_actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(crossfade.Transport.NCCL)
        output = second.total.bind(made)
    with pytest.raises(DeviceError, match="the transport 'nccl' needs a GPU on both sides"):
        output.compile()
    graph = second.total.bind(first.make.bind(crossfade.InputNode())).compile()
    assert graph.execute(100).get(timeout=30) == 4950


def test_pl5_before_each_method_an_actor_looks_for_exchanges_to_enqueue(gpu_actors: list[Any]) -> None:
    """Whichever of its plans has such collectives; and before plain calls."""
    both = gpu_actors[:2]
    crossfade.get([actor.note_looks.remote() for actor in both])
    with crossfade.InputNode() as given:
        others = crossfade.MultiOutputNode([actor.has_looked.bind(given) for actor in both]).compile()
    assert run(others, 1) == crossfade.get([actor.has_looked.remote() for actor in both]) == [False, False]
    with crossfade.InputNode() as given:
        sums = allreduce.bind([actor.make_looking.bind(given) for actor in both])
        outputs = [actor.looks.bind(value) for actor, value in zip(both, sums, strict=True)]
        graph = crossfade.MultiOutputNode(outputs).compile()
    assert {spec.transport for spec in graph.plan.collectives} == {"copy"}
    for _ in range(2):
        assert run(graph, 1) == [([2] * 3, True)] * 2
        assert run(others, 1) == crossfade.get([actor.has_looked.remote() for actor in both]) == [True, True]
    graph.teardown()
    others.teardown()
    assert run(chain([*both, both[0]], "copy"), 3) == expected(3)


@pytest.fixture(scope="module")
def members(session: None) -> list[Any]:
    return [crossfade.remote(Member).options(num_gpus=1, name=f"m{rank}").remote() for rank in range(2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_measured_timeline_has_the_collectives_that_the_prediction_has(members: list[Any], overlap: bool) -> None:
    graph, sizes = all_kinds(members, record=True, overlap=overlap), [1000, 40, 60_000]
    assert {spec.transport for spec in graph.plan.collectives} == {"copy"}
    refs = [graph.execute(size) for size in sizes]
    assert [crossfade.get(ref, timeout=60) for ref in refs] == [wanted_sums(2, size) for size in sizes]
    check_spans(graph, sizes, clock_us=1000.0)
    assert transfers(graph.timeline()) == transfers(graph.predicted_timeline())
    parties = ", ".join(f"{name} (GPU {gpus[0]})" for name, gpus in graph.plan.devices.items())
    assert f"# c0: {parties} by copy: on the stream coll of each\n" in str(graph.plan)
    graph.teardown()
