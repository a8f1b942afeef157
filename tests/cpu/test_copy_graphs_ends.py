"""Graphs over copy engines: values that cannot go, methods that raise, ends, deaths; memory of the host stands for GPUs."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.edges.life import State  # noqa: E402
from crossfade.engines.actor_devices import ActorDevices  # noqa: E402
from crossfade.engines.device_ends import DeviceEnds  # noqa: E402
from crossfade.errors import ActorError, DeviceError  # noqa: E402
from tests.helpers.calm import calm_s  # noqa: E402
from tests.helpers.copy_graphs import Worker, chain, expected, run  # noqa: E402
from tests.helpers.footprint import check_growth  # noqa: E402
from tests.helpers.transport_checks import check_lengths, check_odd_ones_fail, get_all  # noqa: E402
from tests.helpers.waiting import until  # noqa: E402

pytestmark = pytest.mark.usefixtures("torn_down")


class Refusing(Worker):
    """Refuses in the ways that devices may, or is late."""

    def make_on_a_broken_device(self, size: int) -> Any:
        def refuse(*args: Any) -> None:
            raise DeviceError("cuMemcpyAsync failed: CUDA_ERROR_ILLEGAL_ADDRESS")

        HostDriver.copy = refuse  # type: ignore[method-assign, assignment]
        return torch.arange(size)

    def cannot_write(self) -> None:
        def refuse(*args: Any) -> Any:
            raise DeviceError("pinning failed")

        DeviceEnds.writer = refuse  # type: ignore[method-assign, assignment]

    def num_settling(self) -> int:
        """Plans that were left and are not done with; the garbage collector knows the object that has them."""
        (devices,) = (each for each in gc.get_objects() if type(each) is ActorDevices)
        return sum(ends.life.state is not State.DRAINED for ends in devices._plans.values())

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

    def pack_lock_if_odd(self, size: int) -> Any:
        return [torch.arange(size), threading.Lock() if size % 2 else None]

    def length(self, value: Any) -> int:
        return len(value)


Remote = crossfade.remote(Refusing)


@pytest.fixture(scope="module")
def actors(session: None) -> list[Any]:
    return [Remote.remote() for _ in range(3)]


@pytest.fixture(params=["copy", "staged"])
def transport(request: Any) -> str:
    return str(request.param)


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"overlap": True}, {"buffer_bytes": 100_000}], ids=str)
def test_tensors_of_changing_lengths(actors: list[Any], options: dict[str, Any], transport: str) -> None:
    graph = chain(actors, transport, **options)
    check_lengths(graph, [0, 1, 10, 1000, 5, 100_000, 100_000, 7], expected)
    assert {spec.transport for spec in graph.plan.channels if spec.id in ("n0", "n1")} == {transport}
    graph.teardown()


def test_a_tensor_that_is_longer_than_what_is_set_aside_for_its_way(actors: list[Any], transport: str) -> None:
    graph = chain(actors, transport)
    refs = [graph.execute(size) for size in (5_000_000, 3, 4_000_000)]
    assert [crossfade.get(ref, timeout=60) for ref in refs] == [expected(size) for size in (5_000_000, 3, 4_000_000)]


def test_values_that_hold_tensors_among_other_things(actors: list[Any], transport: str) -> None:
    first, second, _ = actors
    graph = second.describe.bind(first.pack.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
    for size in (1, 3, 0):
        assert graph.execute(size).get(timeout=30) == ("x" * size, list(range(size)), True, None)


def test_a_value_that_cannot_be_pickled_costs_one_execution_and_says_where(actors: list[Any], transport: str) -> None:
    first, second, _ = actors
    with crossfade.InputNode() as given:
        graph = second.length.bind(first.pack_lock_if_odd.bind(given).with_tensor_transport(transport)).compile()
    for size in range(4):
        ref = graph.execute(size)
        if size % 2:
            with pytest.raises(
                TypeError, match=r"pickling what it returned(.|\n)*cannot pickle(.|\n)*hint: locks, open"
            ):
                ref.get(timeout=30)
        else:
            assert ref.get(timeout=30) == 2


def test_a_method_that_raises_before_it_sends_costs_one_execution(actors: list[Any], transport: str) -> None:
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.fail_if_odd.bind(given).with_tensor_transport(transport)
        graph = third.total.bind(second.double.bind(made).with_tensor_transport(transport)).compile()
    check_odd_ones_fail(graph, lambda size: size * (size - 1))


def test_kept_tensors_stay_whole_also_after_teardown_and_their_memory_comes_back(
    actors: list[Any], transport: str
) -> None:
    first, second, _ = actors
    for _ in range(3):
        graph = second.keep.bind(first.make.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
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
        get_all(graph, refs)
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
    again = maker.total.bind(reader.make.bind(crossfade.InputNode()).with_tensor_transport("copy")).compile()
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

    def have_settled() -> bool:
        return not any(crossfade.get([actor.num_settling.remote() for actor in (first, second, third)]))

    until(have_settled, pause_s=0.01)


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
    until(lambda: crossfade.get(reader.num_settling.remote()) == 0, pause_s=0.01)


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
    check_growth(cycle, pids)


class WithoutTorch:
    def __init__(self) -> None:
        sys.modules["torch"] = None  # type: ignore[assignment]

    def make(self, size: int) -> bytes:
        return bytes(size)


@pytest.mark.parametrize("transport", ["copy", "staged"])
def test_an_actor_without_torch_names_the_extra(transport: str) -> None:
    first, second = (crossfade.remote(WithoutTorch).remote() for _ in range(2))
    with crossfade.InputNode() as inp:
        node = second.make.bind(first.make.bind(inp).with_tensor_transport(transport))
    with pytest.raises(crossfade.TaskError, match="needs the package 'torch'"):
        node.compile()
