"""One GPU, which actors share: what the driver gives and gets, and what two actors on one GPU give each other."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers import input_workers as cases  # noqa: E402
from tests.helpers.input_workers import CPU, GPU, LIMIT_S, SIZES, InputWorker, batch, get  # noqa: E402
from tests.helpers.sessions import opened  # noqa: E402
from tests.helpers.waiting import until  # noqa: E402

pytestmark = pytest.mark.timeout(300)

Remote = crossfade.remote(InputWorker)


session = opened("module", num_gpus=1)


@pytest.fixture(scope="module")
def on(session: None) -> list[Any]:
    return [Remote.options(num_gpus=0.25).remote() for _ in range(3)]


@pytest.fixture(scope="module")
def off(session: None) -> Any:
    return Remote.remote()


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"buffer_bytes": 1 << 20}, {"debug": True}], ids=str)
@pytest.mark.parametrize(
    ("device", "given_on", "wanted"),
    [
        ("default", "cpu", CPU),
        ("default", "cuda", GPU),
        ("cpu", "cpu", CPU),
        ("cpu", "cuda", CPU),
        ("cuda", "cpu", GPU),
        ("cuda", "cuda", GPU),
    ],
)
def test_tensors_anywhere_in_an_input_are_where_they_are_wanted(
    on: list[Any], device: str, given_on: str, wanted: str, options: dict[str, Any]
) -> None:
    with crossfade.InputNode() as given:
        x = given.with_tensor_transport(device=device)
        graph = crossfade.MultiOutputNode([actor.unpack.bind(x) for actor in on[:2]]).compile(**options)
    num_ahead = min(graph.plan.max_inflight, len(SIZES))
    for size in SIZES:
        for found in get(graph.execute(batch(size, device=given_on))):
            cases.unpacked(found, size, wanted)
    refs = [(size, graph.execute(batch(size, device=given_on))) for size in SIZES[:num_ahead]]
    for size, ref in refs:
        for found in get(ref):
            cases.unpacked(found, size, wanted)
    graph.teardown(timeout=LIMIT_S)


def test_modules_and_sparse_tensors(on: list[Any]) -> None:
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        graph = crossfade.MultiOutputNode([on[0].forward.bind(given[0]), on[0].where.bind(given[1])]).compile()
    for _ in range(3):
        layer, sparse = torch.nn.Linear(4, 3), torch.eye(5).to_sparse()
        (places, made), [(place, total)] = get(graph.execute(layer, sparse))
        assert ([*places, place], total) == ([GPU] * 3, 5)
        assert torch.allclose(torch.tensor(made), layer(torch.ones(4)), atol=1e-3)
    graph.teardown(timeout=LIMIT_S)


def test_parts_and_readers_may_differ(on: list[Any], off: Any) -> None:
    first, second, _ = on
    cases.differing(first, second, off, (1, 3000, 1_000_000)).teardown(timeout=LIMIT_S)


@pytest.mark.parametrize("overlap", [False, True])
def test_inputs_that_are_looked_at_late(on: list[Any], overlap: bool) -> None:
    cases.late_inputs(on[:2], 300, overlap=overlap)


def test_an_input_is_brought_beside_what_the_gpu_does_before(on: list[Any]) -> None:
    """The copy of the second value ends while the kernels of the first method run."""
    with crossfade.InputNode() as given:
        given.x.with_tensor_transport(device="cuda")
        graph = on[0].work.bind(given.x, given.seconds).compile(record=True)
    for seconds in (0.0, 0.0, 0.0, 0.2, 0.0):
        get(graph.execute(x=torch.ones(4_000_000), seconds=seconds))
    refs = [graph.execute(x=torch.ones(4_000_000), seconds=0.2) for _ in range(3)]
    assert [get(ref) for ref in refs] == [4_000_000] * 3
    get(on[0].synchronize.remote())
    spans = graph.timeline().spans
    down = {span.execution: span for span in spans if span.stream == "down"}
    computed = {span.execution: span for span in spans if span.stream == "compute" and span.kind == "compute"}
    assert {span.size_bytes for span in down.values()} == {16_000_000}
    assert {span.label for span in down.values()} == {"read i0"}
    for execution in (6, 7):
        assert down[execution].end_us < computed[execution - 1].end_us
        assert down[execution].end_us <= computed[execution].end_us
    graph.teardown(timeout=LIMIT_S)


def test_kept_inputs_belong_to_who_got_them_also_after_teardown(on: list[Any]) -> None:
    for _ in range(2):
        with crossfade.InputNode() as given:
            given.with_tensor_transport(device="cuda")
            graph = crossfade.MultiOutputNode([actor.keep.bind(given) for actor in on[:2]]).compile(max_inflight=2)
        for size in (10, 20, 3000, 4, 3000, 3_000_000):
            assert get(graph.execute(torch.full((size,), size))) == [True, True]
        graph.teardown(timeout=LIMIT_S)
    get([actor.drop.remote() for actor in on[:2]])


def test_pinned_memory_comes_back_when_the_gpu_has_read_from_it(session: None) -> None:
    """The graph is torn down while kernels run."""
    actor = Remote.options(num_gpus=0.25).remote()
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda")
        graph = actor.work.bind(given[0], given[1]).compile()
    for seconds in (0.0, 0.0, 2.0):
        get(graph.execute(torch.ones(1_000_000), seconds))
    begin = time.monotonic()
    graph.teardown(timeout=LIMIT_S)
    assert time.monotonic() - begin < 1
    until(lambda: get(actor.pinned_slots.remote()) == [], pause_s=0.01)
    crossfade.kill(actor)


@pytest.mark.parametrize("device", ["default", "cpu", "cuda"])
def test_from_an_actor_without_a_gpu_and_back(on: list[Any], off: Any, device: str) -> None:
    cases.there_and_back(off, on[0], device)


@pytest.mark.parametrize("transport", ["copy", "staged"])
def test_actors_on_one_gpu(on: list[Any], off: Any, transport: str) -> None:
    first, second, third = on
    cases.fan_out(first, [second, third], off, transport)
    cases.beside_each_other(first, second, transport)


@pytest.mark.parametrize("transport", ["copy", "staged", "shm"])
def test_a_side_stream_that_rejoins_as_the_guide_says(on: list[Any], transport: str) -> None:
    cases.aside(on[0], on[1], transport, 300)


def test_a_slot_is_not_filled_again_while_a_side_stream_reads_from_it(on: list[Any]) -> None:
    output = on[0].bring_aside.bind(crossfade.InputNode())
    cases.brought_by_itself(output, 100)
