"""Compiled graphs over copy and staged channels, between processes; where there is no GPU, CPU tensors stand for device ones."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.api import session as sessions  # noqa: E402
from crossfade.channels.device_collective import DeviceGroup  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.engines.actor_devices import ActorDevices  # noqa: E402
from crossfade.engines.device_ends import DeviceEnds  # noqa: E402
from crossfade.errors import ActorError, DeviceError  # noqa: E402
from tests.helpers.calm import calm_s  # noqa: E402
from tests.helpers.collective_graphs import Member, all_kinds, check_spans  # noqa: E402
from tests.helpers.collective_graphs import expected as wanted_sums  # noqa: E402
from tests.helpers.footprint import footprint, settled_growth  # noqa: E402

torch.set_num_threads(1)


class Worker:
    """Makes tensors and says what it gets."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._kept: list[Any] = []
        self._num_looks = 0

    def pid(self) -> int:
        return os.getpid()

    def make(self, size: int) -> Any:
        return torch.arange(size)

    def double(self, value: Any) -> Any:
        return value * 2

    def total(self, *values: Any) -> int:
        return int(sum(value.sum() for value in values))

    def describe(self, value: Any) -> Any:
        return value["name"], value["tensor"].tolist(), value["list"][0].dtype is torch.bfloat16, value["list"][1]

    def pack(self, size: int) -> Any:
        return {"name": "x" * size, "tensor": torch.arange(size), "list": [torch.ones(3, dtype=torch.bfloat16), None]}

    def keep(self, value: Any) -> Any:
        """All that it got until now is as it was."""
        self._kept.append((value, value.clone()))
        return all(torch.equal(one, other) for one, other in self._kept)

    def drop(self) -> int:
        self._kept.clear()
        return os.getpid()

    def fail_if_odd(self, size: int) -> Any:
        if size % 2:
            raise KeyError(size)
        return torch.arange(size)

    def make_on_a_broken_device(self, size: int) -> Any:
        def refuse(*args: Any) -> None:
            raise DeviceError("cuMemcpyAsync failed: CUDA_ERROR_ILLEGAL_ADDRESS")

        HostDriver.copy = refuse  # type: ignore[method-assign, assignment]
        return torch.arange(size)

    def count_looks(self) -> None:
        """From now on: how often it was seen to it that exchanges are enqueued."""
        enqueue_all = DeviceGroup.enqueue_all

        def counted(group: DeviceGroup) -> None:
            self._num_looks += 1
            enqueue_all(group)

        DeviceGroup.enqueue_all = counted  # type: ignore[method-assign, assignment]

    def make_counted(self, size: int) -> Any:
        return torch.full((3,), self._num_looks)

    def looks(self, value: Any) -> Any:
        return value.tolist(), self._num_looks

    def cannot_write(self) -> None:
        def refuse(*args: Any) -> Any:
            raise DeviceError("pinning failed")

        DeviceEnds.writer = refuse  # type: ignore[method-assign, assignment]

    def num_settling(self) -> int:
        """Plans that were left and are not done with; the garbage collector knows the object that has them."""
        (devices,) = (each for each in gc.get_objects() if type(each) is ActorDevices)
        return len(devices._open) + len(devices._settling)

    def touch(self, value: Any, path: str) -> int:
        Path(path).touch()
        return len(value)

    def break_device(self, name: str) -> None:
        """From now on it refuses this."""

        def refuse(*args: Any) -> Any:
            raise DeviceError("an illegal address")

        setattr(HostDriver, name, refuse)

    def wait(self, value: Any, path: str) -> Any:
        while not os.path.exists(path):
            time.sleep(0.01)
        return value

    def name(self) -> str:
        return str(torch.get_num_threads())


Remote = crossfade.remote(Worker)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    crossfade.init(num_gpus=16)
    yield
    crossfade.shutdown()


@pytest.fixture(autouse=True)
def torn_down(session: None) -> Iterator[None]:
    """No graph outlives its test."""
    yield
    for opened in list(sessions.require().graphs):
        opened.teardown(timeout=30)


@pytest.fixture(scope="module")
def actors(session: None) -> list[Any]:
    return [Remote.remote() for _ in range(3)]


@pytest.fixture(scope="module")
def gpu_actors(session: None) -> list[Any]:
    """Actors with a GPU each, which a machine without any does not have."""
    return [Remote.options(num_gpus=1, name=name).remote() for name in ("above", "below", "last")]


@pytest.fixture(params=["copy", "staged"])
def transport(request: Any) -> str:
    return str(request.param)


def chain(actors: list[Any], transport: str, **options: Any) -> Any:
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        doubled = second.double.bind(made).with_tensor_transport(transport)
        return crossfade.MultiOutputNode([third.total.bind(doubled, made), second.total.bind(made)]).compile(**options)


def run(graph: crossfade.CompiledGraph, size: int) -> Any:
    return crossfade.get(graph.execute(size), timeout=30)


def wait_for_all(graph: crossfade.CompiledGraph, refs: list[Any]) -> None:
    for ref in [*refs, graph.execute(1)]:
        crossfade.get(ref, timeout=30)


def expected(size: int) -> list[int]:
    return [3 * (size * (size - 1) // 2), size * (size - 1) // 2]


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"overlap": True}, {"buffer_bytes": 100_000}], ids=str)
def test_tensors_of_changing_lengths(actors: list[Any], options: dict[str, Any], transport: str) -> None:
    graph = chain(actors, transport, **options)
    sizes = [0, 1, 10, 1000, 5, 100_000, 100_000, 7]
    for size in sizes:
        assert run(graph, size) == expected(size)
    num_ahead = min(len(sizes), graph.plan.max_inflight)
    refs = [graph.execute(size) for size in sizes[:num_ahead]]
    assert [crossfade.get(ref, timeout=30) for ref in refs] == [expected(size) for size in sizes[:num_ahead]]
    assert {spec.transport for spec in graph.plan.channels if spec.id in ("n0", "n1")} == {transport}
    graph.teardown()


def test_a_tensor_that_is_longer_than_what_is_set_aside_for_its_way(actors: list[Any], transport: str) -> None:
    graph = chain(actors, transport)
    refs = [graph.execute(size) for size in (5_000_000, 3, 4_000_000)]
    assert [crossfade.get(ref, timeout=60) for ref in refs] == [expected(size) for size in (5_000_000, 3, 4_000_000)]


def test_values_that_hold_tensors_among_other_things(actors: list[Any], transport: str) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        graph = second.describe.bind(first.pack.bind(given).with_tensor_transport(transport)).compile()
    for size in (1, 3, 0):
        assert graph.execute(size).get(timeout=30) == ("x" * size, list(range(size)), True, None)


def test_a_method_that_raises_before_it_sends_costs_one_execution(actors: list[Any], transport: str) -> None:
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.fail_if_odd.bind(given).with_tensor_transport(transport)
        graph = third.total.bind(second.double.bind(made).with_tensor_transport(transport)).compile()
    for size in range(10):
        ref = graph.execute(size)
        if size % 2:
            with pytest.raises(KeyError):
                ref.get(timeout=30)
        else:
            assert ref.get(timeout=30) == size * (size - 1)


def test_kept_tensors_stay_whole_also_after_teardown_and_their_memory_comes_back(
    actors: list[Any], transport: str
) -> None:
    first, second, _ = actors
    for _ in range(3):
        with crossfade.InputNode() as given:
            graph = second.keep.bind(first.make.bind(given).with_tensor_transport(transport)).compile()
        for size in (10, 20, 3000, 4, 3000):
            assert graph.execute(size).get(timeout=30)
        graph.teardown()
    crossfade.get(second.drop.remote())
    graph = chain(actors, transport)
    assert run(graph, 5) == expected(5)
    graph.teardown()


def test_two_graphs_on_the_same_actors(actors: list[Any], transport: str) -> None:
    one, other = chain(actors, transport), chain(actors[::-1], transport)
    refs = [(size, one.execute(size), other.execute(size + 1)) for size in range(0, 3000, 500)]
    for size, mine, theirs in refs:
        assert crossfade.get(mine, timeout=30) == expected(size)
        assert crossfade.get(theirs, timeout=30) == expected(size + 1)
    one.teardown()
    assert run(other, 4) == expected(4)


def test_a_reader_asks_for_memory_while_its_program_stands_elsewhere(actors: list[Any], transport: str) -> None:
    """The second actor waits for the third, which waits for the first, whose longer value needs new slots on the second."""
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        other = first.make.bind(given)
        late = third.double.bind(other).with_tensor_transport(transport)
        graph = second.total.bind(late, made).compile(overlap=True)
    for size in (1, 10, 100, 1000, 10_000, 100_000):
        assert graph.execute(size).get(timeout=30) == 3 * (size * (size - 1) // 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_actor_is_named_and_the_others_go_on(actors: list[Any], victim: int, transport: str) -> None:
    mortal, left = Remote.options(name=f"{transport}{victim}").remote(), actors[:2]
    graph = chain([*left[:victim], mortal, *left[victim:]], transport)
    assert run(graph, 100) == expected(100)
    refs = [graph.execute(3_000_000) for _ in range(5)]
    os.kill(crossfade.get(mortal.pid.remote()), signal.SIGKILL)
    begin = calm_s()
    with pytest.raises(crossfade.ActorDiedError, match=f"{transport}{victim}"):
        wait_for_all(graph, refs)
    assert calm_s() - begin < 2
    graph.teardown()
    again = chain([left[0], left[1], left[0]], transport)
    assert run(again, 100) == expected(100)


@pytest.mark.timeout(60)
def test_a_copy_that_cannot_be_enqueued_is_the_value_s_error_and_the_graph_s_end(actors: list[Any]) -> None:
    maker, reader = Remote.options(name="maker").remote(), actors[0]
    with crossfade.InputNode() as given:
        made = maker.make_on_a_broken_device.bind(given).with_tensor_transport("copy")
        graph = reader.total.bind(made).compile()
    with pytest.raises(DeviceError, match=r"maker\.make_on_a_broken_device \(node n0\).*ILLEGAL_ADDRESS"):
        run(graph, 7)
    with pytest.raises(
        ActorError, match=f"actor maker cannot go on .*ILLEGAL_ADDRESS.* on its way to {reader._info.id}"
    ):
        run(graph, 5)
    with pytest.raises(ActorError, match="actor maker cannot go on"):
        graph.execute(5)
    graph.teardown(timeout=30)
    with crossfade.InputNode() as given:
        again = maker.total.bind(reader.make.bind(given).with_tensor_transport("copy")).compile()
    assert run(again, 100) == 4950


@pytest.mark.timeout(60)
def test_a_writer_that_dies_when_its_reader_has_left_the_plan(actors: list[Any], tmp_path: Path) -> None:
    """The reader waits for the writer to say that it has finished, which the writer, busy in a method, never does."""
    maker, reader = Remote.remote(), actors[0]
    pid = crossfade.get(maker.pid.remote())
    arrived = tmp_path / "arrived"
    with crossfade.InputNode() as given:
        made = maker.make.bind(given).with_tensor_transport("copy")
        outputs = [reader.touch.bind(made, str(arrived)), maker.wait.bind(given, str(tmp_path / "never"))]
        graph = crossfade.MultiOutputNode(outputs).compile()
    ref = graph.execute(1000)
    while not arrived.exists():
        time.sleep(0.01)
    with pytest.raises(crossfade.TeardownTimeout):
        graph.teardown(timeout=0.5)
    os.kill(pid, signal.SIGKILL)
    graph.teardown(timeout=20)
    del ref
    assert crossfade.get(reader.drop.remote(), timeout=20)


@pytest.fixture(scope="module")
def without_memory(session: None) -> list[Any]:
    """Two actors that cannot open an end to write to."""
    both = [Remote.remote() for _ in range(2)]
    crossfade.get([actor.cannot_write.remote() for actor in both])
    return both


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{}, {"buffer_bytes": 100_000}], ids=str)
def test_where_one_cannot_open_its_ends_nobody_waits_for_it(
    actors: list[Any], without_memory: list[Any], options: dict[str, Any]
) -> None:
    """Neither those who read from it and have set memory aside, nor it itself, which reads from others and from such as it."""
    first, (second, third) = actors[0], without_memory
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport("copy")
        doubled = second.double.bind(made).with_tensor_transport("copy")
        again = third.double.bind(doubled).with_tensor_transport("copy")
        total = first.total.bind(doubled, again)
        for _ in range(2):
            with pytest.raises(DeviceError, match="pinning failed"):
                total.compile(**options)
    for actor in (first, second, third):
        assert until(lambda actor=actor: crossfade.get(actor.num_settling.remote()) == 0)


def until(is_so: Any) -> bool:
    deadline = time.monotonic() + 10
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("refused", "by"), [("is_idle", "copy"), ("is_idle", "staged"), ("open_handle", "copy")])
def test_a_device_that_refuses_ends_a_plan_and_not_its_actor(actors: list[Any], refused: str, by: str) -> None:
    """When it is asked to close slots, or whether it is done; or to open slots that come when no step waits for them."""
    maker, reader = Remote.options(name=f"maker_{refused}_{by}").remote(), actors[0]
    with crossfade.InputNode() as given:
        made = maker.make.bind(given).with_tensor_transport(by)
        graph = crossfade.MultiOutputNode([reader.total.bind(made), maker.name.bind()]).compile()
    assert run(graph, 7)[0] == 21
    crossfade.get(maker.break_device.remote(refused))
    if refused == "open_handle":
        with pytest.raises((ActorError, DeviceError), match="an illegal address"):
            run(graph, 100_000)
    graph.teardown(timeout=20)
    assert crossfade.get([actor.drop.remote() for actor in (maker, reader)], timeout=20)
    assert until(lambda: crossfade.get(reader.num_settling.remote()) == 0)


def test_teardown_with_executions_in_flight(actors: list[Any], transport: str) -> None:
    for _ in range(5):
        graph = chain(actors, transport)
        refs = [graph.execute(10_000) for _ in range(5)]
        graph.teardown(timeout=30)
        del refs
    assert run(chain(actors, transport), 3) == expected(3)


def test_graphs_that_come_and_go_leave_nothing(actors: list[Any], transport: str) -> None:
    def cycle(num: int) -> None:
        for _ in range(num):
            graph = chain(actors, transport)
            assert run(graph, 1000) == expected(1000)
            graph.teardown(timeout=30)

    pids = [os.getpid(), *(crossfade.get(actor.pid.remote()) for actor in actors)]
    cycle(5)
    before = [footprint(pid) for pid in pids]
    cycle(20)
    for first, pid in zip(before, pids, strict=True):
        grown = settled_growth(first, pid)
        assert grown.pop("private_bytes", 0) < 4 << 20, grown
        assert grown.pop("shared_bytes", 0) < 1 << 20
        assert grown.pop("ring_bytes", 0) < 1 << 16, (pid, pids, grown)
        assert grown == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_gpus_that_the_session_claims_and_the_machine_lacks_are_the_cpu(gpu_actors: list[Any]) -> None:
    first, second, third = gpu_actors
    with crossfade.InputNode() as given:
        graph = third.total.bind(second.double.bind(first.make.bind(given))).compile()
    assert [spec.transport for spec in graph.plan.channels] == ["shm", "copy", "copy", "shm"]
    assert graph.execute(100).get(timeout=30) == 9900


def transfers(timeline: crossfade.Timeline) -> set[tuple[str, str, str]]:
    """What moved on which streams besides the hosts' main ones."""
    hosts = ("main", "get")
    return {(s.actor, s.stream, s.label) for s in timeline.spans if s.kind == "communicate" and s.stream not in hosts}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_a_measured_timeline_has_the_spans_of_devices(gpu_actors: list[Any]) -> None:
    first, second, _ = gpu_actors
    with crossfade.InputNode() as given:
        graph = second.total.bind(first.make.bind(given)).compile(record=True)
    for _ in range(3):
        assert crossfade.get(graph.execute(100_000), timeout=30) == 4999950000
    spans = [span for span in graph.timeline().spans if span.stream in ("compute", "push")]
    assert [(span.actor, span.stream, span.label, span.execution) for span in spans if span.execution == 1] == [
        ("above", "compute", "run n0", 1),
        ("above", "push", "write n0", 1),
        ("below", "compute", "run n1", 1),
    ]
    assert transfers(graph.predicted_timeline()) == transfers(graph.timeline()) == {("above", "push", "write n0")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_nccl_says_that_it_needs_gpus(gpu_actors: list[Any]) -> None:
    first, second, _ = gpu_actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(crossfade.Transport.NCCL)
        output = second.total.bind(made)
    with pytest.raises(DeviceError, match="the transport 'nccl' needs a GPU on both sides"):
        output.compile()
    with crossfade.InputNode() as given:
        graph = second.total.bind(first.make.bind(given)).compile()
    assert graph.execute(100).get(timeout=30) == 4950


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_pl5_before_each_method_an_actor_looks_for_exchanges_to_enqueue(gpu_actors: list[Any]) -> None:
    """Where its plan has such collectives."""
    both = gpu_actors[:2]
    crossfade.get([actor.count_looks.remote() for actor in both])
    with crossfade.InputNode() as given:
        sums = allreduce.bind([actor.make_counted.bind(given) for actor in both])
        outputs = [actor.looks.bind(value) for actor, value in zip(both, sums, strict=True)]
        graph = crossfade.MultiOutputNode(outputs).compile()
    assert {spec.transport for spec in graph.plan.collectives} == {"copy"}
    assert [run(graph, 1) for _ in range(2)] == [[([2] * 3, 2)] * 2, [([6] * 3, 4)] * 2]
    graph.teardown()
    assert run(chain([*both, both[0]], "copy"), 3) == expected(3)


@pytest.fixture(scope="module")
def members(session: None) -> list[Any]:
    return [crossfade.remote(Member).options(num_gpus=1, name=f"m{rank}").remote() for rank in range(2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
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
