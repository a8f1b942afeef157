"""Compiled graphs over NCCL channels, between processes, with gloo in NCCL's place and CPU tensors in that of device tensors."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers.calm import calm_s  # noqa: E402
from tests.helpers.copy_graphs import NcclWorker  # noqa: E402
from tests.helpers.footprint import footprint, growth  # noqa: E402
from tests.helpers.transport_checks import check_lengths, check_odd_ones_fail, get_all  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs: see tests/gpu2"),
    pytest.mark.usefixtures("torn_down"),
]


Remote = crossfade.remote(NcclWorker)


@pytest.fixture(scope="module")
def actors(session: None) -> list[Any]:
    return [Remote.options(num_gpus=1).remote() for _ in range(3)]


def chain(actors: list[Any], method: str = "make", **options: Any) -> crossfade.CompiledGraph:
    """Both readers of the first value, one of the second, and one value back."""
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = getattr(first, method).bind(given).with_tensor_transport(crossfade.Transport.NCCL)
        doubled = second.double.bind(made).with_tensor_transport(crossfade.Transport.NCCL)
        outputs = [third.total.bind(doubled, made), first.total.bind(doubled)]
        graph: crossfade.CompiledGraph = crossfade.MultiOutputNode(outputs).compile(**options)
    return graph


def expected(size: int) -> list[int]:
    return [3 * (size * (size - 1) // 2), size * (size - 1)]


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"overlap": True}], ids=str)
def test_tensors_of_changing_lengths(actors: list[Any], options: dict[str, Any]) -> None:
    graph = chain(actors, **options)
    check_lengths(graph, [0, 1, 10, 1000, 5, 100_000, 100_000, 7], expected)
    assert {graph.plan.channel[name].transport for name in ("n0", "n1")} == {"nccl"}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_measured_timeline_has_the_transfers_that_the_prediction_has(actors: list[Any], overlap: bool) -> None:
    """On the streams that the plan names, with the bytes of their execution's value, also where receives are asked for ahead."""
    graph, sizes = chain(actors, record=True, overlap=overlap), [1000, 30, 500]
    refs = [graph.execute(size) for size in sizes]
    assert [crossfade.get(ref, timeout=30) for ref in refs] == [expected(size) for size in sizes]
    predicted, measured = (
        [span for span in timeline.spans if span.stream == "nccl"]
        for timeline in (graph.predicted_timeline(num_executions=3), graph.timeline())
    )
    names = list(graph.plan.devices)
    moves = [(0, "send n0"), (1, "recv n0"), (2, "recv n0"), (1, "send n1"), (0, "recv n1"), (2, "recv n1")]
    for spans in (predicted, measured):
        assert {(span.actor, span.label) for span in spans} == {(names[number], label) for number, label in moves}
    assert {(span.kind, span.size_bytes) for span in measured} == {("communicate", 8 * size) for size in sizes}
    assert all(span.size_bytes == 8 * sizes[span.execution] for span in measured)
    assert f"sent on {names[0]}'s stream nccl, received on {names[1]}'s stream nccl" in str(graph.plan)


def test_a_method_that_raises_before_it_sends_costs_one_execution(actors: list[Any]) -> None:
    check_odd_ones_fail(chain(actors, "fail_if_odd"), expected)


def test_teardown_with_executions_in_flight(actors: list[Any]) -> None:
    for overlap in (False, True, False):
        graph = chain(actors, overlap=overlap)
        refs = [graph.execute(10_000) for _ in range(5)]
        graph.teardown(timeout=30)
        del refs
    assert crossfade.get(chain(actors).execute(3), timeout=30) == expected(3)


def test_graphs_that_come_and_go_leave_nothing(actors: list[Any]) -> None:
    def cycle(num: int) -> None:
        for _ in range(num):
            graph = chain(actors)
            assert crossfade.get(graph.execute(1000), timeout=30) == expected(1000)
            graph.teardown(timeout=30)

    pids = [crossfade.get(actor.pid.remote()) for actor in actors]
    cycle(3)
    before = [footprint(pid) for pid in pids]
    cycle(10)
    grown: dict[int, dict[str, int]] = {}
    deadline = time.monotonic() + 10  # groups end in the background
    while time.monotonic() < deadline:
        grown = {pid: growth(first, footprint(pid)) for first, pid in zip(before, pids, strict=True)}
        if not any(each.keys() - {"private_bytes", "shared_bytes", "ring_bytes"} for each in grown.values()):
            return
        time.sleep(0.01)
    raise AssertionError(f"what was left: {grown}")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_actor_is_named_and_the_others_go_on(session: None, actors: list[Any], victim: int) -> None:
    mortal = Remote.options(num_gpus=1, name=f"mortal{victim}").remote()
    pair = [actors[0], actors[1]]
    pair.insert(victim, mortal)
    graph = chain(pair)
    assert crossfade.get(graph.execute(100), timeout=30) == expected(100)
    pid = crossfade.get(mortal.pid.remote())
    refs = [graph.execute(300_000) for _ in range(5)]
    os.kill(pid, signal.SIGKILL)
    begin = calm_s()
    with pytest.raises(crossfade.ActorDiedError, match=f"mortal{victim}"):
        get_all(graph, refs)
    assert calm_s() - begin < 2
    graph.teardown(timeout=30)
    assert crossfade.get(chain(actors).execute(3), timeout=30) == expected(3)
