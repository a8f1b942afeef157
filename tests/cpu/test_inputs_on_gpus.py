"""What the driver gives, with the tensors in it on the GPUs of who reads it, between processes; the CPU stands for the GPUs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.errors import GraphError, TaskError  # noqa: E402
from crossfade.types import DRIVER  # noqa: E402
from tests.helpers.footprint import check_growth, footprint  # noqa: E402
from tests.helpers.input_workers import (  # noqa: E402
    CPU,
    GPU,
    LIMIT_S,
    SIZES,
    InputWorker,
    OnlyOnce,
    Unpicklable,
    batch,
    differing,
    get,
    plain,
)
from tests.helpers.waiting import until  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs: tests/gpu1/test_inputs.py"),
    pytest.mark.usefixtures("torn_down"),
]

Remote = crossfade.remote(InputWorker)


@pytest.fixture(scope="module")
def on(session: None) -> list[Any]:
    return [Remote.options(num_gpus=1, name=name).remote() for name in ("one", "two")]


@pytest.fixture(scope="module")
def off(session: None) -> Any:
    return Remote.options(name="off").remote()


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"buffer_bytes": 1 << 20}], ids=str)
@pytest.mark.parametrize(("device", "wanted"), [("default", CPU), ("cpu", CPU), ("cuda", GPU), ("gpu", GPU)])
def test_tensors_anywhere_in_an_input_are_where_they_are_wanted(
    on: list[Any], device: str, wanted: str, options: dict[str, Any]
) -> None:
    with crossfade.InputNode() as given:
        x = given.with_tensor_transport(device=device)
        graph = crossfade.MultiOutputNode([actor.unpack.bind(x) for actor in on]).compile(**options)
    num_ahead = min(graph.plan.max_inflight, len(SIZES))
    for size in SIZES:
        for places, found in get(graph.execute(batch(size))):
            assert found == plain(size)
            assert set(places[size == 0 :]) == {wanted} or size == 0
    refs = [graph.execute(batch(size)) for size in SIZES[:num_ahead]]
    assert [[found for _, found in get(ref)] for ref in refs] == [[plain(size)] * 2 for size in SIZES[:num_ahead]]


def test_debug_mode_sees_a_change_of_what_was_brought(on: list[Any]) -> None:
    with crossfade.InputNode() as given:
        x = given.with_tensor_transport(device="cuda")
        looked = on[0].unpack.bind(x)
        graph = crossfade.MultiOutputNode([looked, on[0].keep.bind(given.tokens), on[0].where.bind(given.tokens)])
        opened = graph.compile(debug=True)
    value = batch(30)
    first, *others = opened.execute(value)
    assert get(first)[1] == plain(30)
    assert get(others[0]) is True
    with pytest.raises(
        crossfade.MutatedValueError, match=r"the graph's input \.tokens \(i1\) was changed on actor one"
    ):
        get(others[1])
    opened.teardown(timeout=LIMIT_S)
    get(on[0].drop.remote())


def test_modules_and_sparse_tensors(on: list[Any]) -> None:
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        graph = crossfade.MultiOutputNode([on[0].forward.bind(given[0]), on[0].where.bind(given[1])]).compile()
    for _ in range(3):
        layer, sparse = torch.nn.Linear(4, 3), torch.eye(5).to_sparse()
        (places, made), [(_, total)] = get(graph.execute(layer, sparse))
        assert (places, total) == ([GPU] * 2, 5)
        assert torch.allclose(torch.tensor(made), layer(torch.ones(4)))


def test_parts_and_readers_may_differ(on: list[Any], off: Any) -> None:
    first, second = on
    graph = differing(first, second, off, (1, 3000), record=True)
    assert {spec.id: spec.readers for spec in graph.plan.channels if spec.value == "i1"} == {
        "i1": ("one",),
        "i1~shm": ("two", "off"),
    }
    written = [span.label for span in graph.timeline().spans if span.actor == DRIVER and span.label[:5] == "write"]
    assert {label: written.count(label) for label in written} == dict.fromkeys(
        ["write i0", "write i1", "write i1~shm", "write i2"], 2
    )


def test_an_input_that_is_written_twice_and_cannot_be_pickled_twice(on: list[Any]) -> None:
    """The first ring has the value, the second the error; the graph goes on."""
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda", reader=on[0])
        graph = crossfade.MultiOutputNode([actor.where.bind(given) for actor in on]).compile()
    assert len([spec for spec in graph.plan.channels if spec.writer == DRIVER]) == 2
    for _ in range(3):
        assert get(graph.execute(torch.ones(9))) == [[(GPU, 9)], [(CPU, 9)]]
        with pytest.raises(ValueError, match="this is not to be pickled"):
            get(graph.execute([torch.ones(9), Unpicklable()]))
        with pytest.raises((TaskError, ValueError), match="it was pickled before"):
            get(graph.execute([torch.ones(9), OnlyOnce()])[1])
    assert get(graph.execute(torch.ones(9))) == [[(GPU, 9)], [(CPU, 9)]]


def test_several_inputs_of_which_one_cannot_be_pickled(on: list[Any]) -> None:
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        graph = on[0].where.bind(given[0], given[1]).compile()
    for _ in range(3):
        with pytest.raises(ValueError, match="this is not to be pickled"):
            get(graph.execute(torch.ones(2), Unpicklable()))
        assert get(graph.execute(torch.ones(2), torch.ones(3))) == [(GPU, 2), (GPU, 3)]


def test_an_actor_without_a_gpu_is_told_so_when_the_graph_is_compiled(on: list[Any], off: Any) -> None:
    with crossfade.InputNode() as given:
        x = given.tokens.with_tensor_transport(device="cuda")
        output = crossfade.MultiOutputNode([on[0].where.bind(x), off.where.bind(x)])
    with pytest.raises(
        GraphError, match=r"inp\.tokens asks .* on the GPU of off, which has none\nhint: .*reader=\.\.\."
    ):
        output.compile()
    x.with_tensor_transport(reader=off)
    graph = output.compile()
    assert get(graph.execute(tokens=torch.ones(4))) == [[(GPU, 4)], [(CPU, 4)]]


def test_results_for_the_driver_are_on_the_cpu(on: list[Any]) -> None:
    kept = on[0].keep.bind(crossfade.InputNode()).with_tensor_transport(device="cuda")
    with pytest.raises(GraphError, match="on the GPU of the driver, which uses none\nhint: "):
        kept.compile()
    with kept.with_tensor_transport(device="cpu").compile() as graph:
        assert get(graph.execute(torch.zeros(3))) is True
    on[0].drop.remote()


def test_copies_are_predicted_and_measured(on: list[Any]) -> None:
    first, second = on
    with crossfade.InputNode() as given:
        given.x.with_tensor_transport(device="cuda")
        outputs = [first.where.bind(given.x, given.y), second.where.bind(given.x)]
        graph = crossfade.MultiOutputNode(outputs).compile(record=True)
    sizes = [10, 3000, 100_000]
    for size in sizes:
        get(graph.execute(x=torch.ones(size), y=torch.ones(7)))
    work = crossfade.Workload(value_bytes={"i0": 4000, "i1": 28}, device_us={"where": 10.0})
    predicted = graph.predicted_timeline(work, num_executions=3)
    wanted = [(name, "read i0", number) for name in ("one", "two") for number in range(3)]
    measured, reckoned = (copies_down(timeline) for timeline in (graph.timeline(), predicted))
    for spans in (measured, reckoned):
        assert sorted((span.actor, span.label, span.execution) for span in spans) == wanted
    assert all(span.size_bytes == 4 * sizes[span.execution] for span in measured)
    at_one = [span for span in predicted.spans if (span.actor, span.execution, span.kind) == ("one", 0, "compute")]
    (ran,) = [span for span in at_one if span.stream == "compute"]
    (brought,) = [span for span in reckoned if (span.actor, span.execution) == ("one", 0)]
    assert ran.start_us >= brought.end_us > brought.start_us


def copies_down(timeline: crossfade.Timeline) -> list[Any]:
    return [span for span in timeline.spans if span.stream == "down" and span.kind == "communicate"]


def test_kept_tensors_belong_to_who_got_them_also_after_teardown(on: list[Any]) -> None:
    """They lie in memory of their own, however many are kept, and no slot is held for them."""
    for _ in range(2):
        with crossfade.InputNode() as given:
            given.with_tensor_transport(device="cuda")
            outputs = [actor.keep.bind(given) for actor in on]
            graph = crossfade.MultiOutputNode(outputs).compile(max_inflight=2)
        for size in (10, 20, 3000, 4, 3000, 100_000):
            assert get(graph.execute(torch.full((size,), size))) == [True, True]
        counts = graph.statistics().actors["one"].channels["read i0"]
        assert (counts["num_kept"], counts["num_copied_out"]) == (0, 0)
        graph.teardown(timeout=LIMIT_S)
    get([actor.drop.remote() for actor in on])


def test_pinned_memory_is_given_back_at_teardown(on: list[Any]) -> None:
    first, _ = on
    with crossfade.InputNode() as given:
        graph = first.where.bind(given.with_tensor_transport(device="cuda")).compile()
    assert get(first.pinned_slots.remote()) == []
    for size in (3000, 100_000, 3000):
        get(graph.execute(torch.ones(size)))
    assert set(get(first.pinned_slots.remote())) == {"mapped: slots of i0"}
    graph.teardown(timeout=LIMIT_S)
    assert get(first.pinned_slots.remote()) == []


def test_pinned_memory_of_a_plan_that_is_left_while_the_device_works_is_given_back_later(
    session: None, tmp_path: Path
) -> None:
    """Also if nothing else happens on the actor."""
    busy = Remote.options(num_gpus=1).remote()
    with crossfade.InputNode() as given:
        graph = busy.where.bind(given.with_tensor_transport(device="cuda")).compile()
    get(graph.execute(torch.ones(3000)))
    get(busy.be_busy_until.remote(str(tmp_path / "idle")))
    pid = get(busy.pid.remote())
    before = footprint(pid).num_ring_mappings
    graph.teardown(timeout=LIMIT_S)
    assert get(busy.pinned_slots.remote()) == ["mapped: slots of i0"]
    still = footprint(pid).num_ring_mappings
    assert 0 < still < before
    (tmp_path / "idle").touch()
    until(lambda: footprint(pid).num_ring_mappings < still, pause_s=0.01)
    assert get(busy.pinned_slots.remote()) == []
    crossfade.kill(busy)


def test_graphs_that_come_and_go_leave_nothing(on: list[Any]) -> None:
    def cycle(num: int) -> None:
        for _ in range(num):
            with crossfade.InputNode() as given:
                given.with_tensor_transport(device="cuda", reader=on[0])
                graph = crossfade.MultiOutputNode([actor.where.bind(given) for actor in on]).compile()
            refs = [graph.execute(torch.ones(size)) for size in (1000, 30_000)]
            assert [get(ref)[0] for ref in refs] == [[(GPU, 1000)], [(GPU, 30_000)]]
            del refs
            graph.teardown(timeout=LIMIT_S)

    pids = [os.getpid(), *get([actor.pid.remote() for actor in on])]
    check_growth(cycle, pids)


def has_died(graph: crossfade.CompiledGraph, name: str) -> bool:
    """Whether an execution is told that it has."""
    try:
        get(graph.execute(torch.ones(100_000)))
    except crossfade.ActorDiedError as error:
        return name in str(error)
    return False


@pytest.mark.timeout(60)
def test_a_reader_that_dies_is_named_and_the_other_goes_on(on: list[Any]) -> None:
    mortal = Remote.options(num_gpus=1, name="mortal").remote()
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        graph = crossfade.MultiOutputNode([actor.where.bind(given) for actor in (on[0], mortal)]).compile()
    assert get(graph.execute(torch.ones(3))) == [[(GPU, 3)]] * 2
    os.kill(get(mortal.pid.remote()), signal.SIGKILL)
    until(lambda: has_died(graph, "mortal"), pause_s=0.01)
    graph.teardown(timeout=LIMIT_S)
    until(lambda: get(on[0].pinned_slots.remote()) == [], pause_s=0.01)
    with crossfade.InputNode() as given:
        again = on[0].where.bind(given.with_tensor_transport(device="cuda")).compile()
    assert get(again.execute(torch.ones(3))) == [(GPU, 3)]
