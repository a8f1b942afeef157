"""Two GPUs: values between actors by copy engines, through the host, and by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain as chained
from itertools import repeat
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.api import session as sessions  # noqa: E402
from crossfade.device.context import DeviceContext  # noqa: E402
from crossfade.device.cuda import CudaDriver  # noqa: E402
from crossfade.device.memory import Pool  # noqa: E402
from crossfade.device.streams import Streams  # noqa: E402
from crossfade.edges.nccl_link import nccl_group  # noqa: E402
from crossfade.errors import DeviceError, StaticShapeError  # noqa: E402
from crossfade.testing import conformance  # noqa: E402
from tests.helpers.gpus import num_gpus  # noqa: E402
from tests.helpers.nccl_pair import open_nccl_pair  # noqa: E402
from tests.helpers.sessions import opened  # noqa: E402
from tests.helpers.staged_pair import open_staged_pair  # noqa: E402
from tests.helpers.transport_checks import check_lengths, check_odd_ones_fail  # noqa: E402

pytestmark = pytest.mark.timeout(300)

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
]  # fmt: skip
TRANSPORTS = ["copy", "staged", crossfade.Transport.NCCL]


def homes_on_two_gpus() -> Callable[[], DeviceContext]:
    """The first on one GPU, all others on the other one."""
    devices = chained([0], repeat(1))

    def make() -> DeviceContext:
        driver = CudaDriver(next(devices))
        return DeviceContext(driver, Pool(driver), Streams(driver))

    return make


def open_staged(depth: int, num_readers: int) -> AbstractContextManager[Any]:
    return open_staged_pair(depth, num_readers, make_home=homes_on_two_gpus())


def open_nccl(depth: int, num_readers: int) -> AbstractContextManager[Any]:
    return open_nccl_pair(depth, num_readers, make_home=homes_on_two_gpus(), make_group=nccl_group)


# Both ends in this process. (The copy channel needs two: a process cannot open its own memory by a handle.)
if num_gpus() >= 2:
    TestStaged = conformance.suite(open_staged)
    TestNccl = conformance.suite(open_nccl)


class Worker:
    """Makes tensors on its GPU, and says what it gets."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def of_dtype(self, name: str) -> Any:
        return torch.arange(1, 1000, device="cuda").remainder(100).to(getattr(torch, name))

    def on_host(self, value: Any) -> Any:
        assert value.is_cuda
        assert value.device.index == torch.cuda.current_device()
        return value.cpu() if value.dtype.itemsize != 1 else value.view(torch.uint8).cpu()

    def make(self, size: int) -> Any:
        return torch.arange(size, device="cuda")

    def make_late(self, number: int, size: int) -> Any:
        """Computed long after the method has returned, behind what it was before."""
        value = torch.full((size,), -1, device="cuda")
        torch.cuda._sleep(1_000_000)
        return value.fill_(number)

    def double(self, value: Any) -> Any:
        return value * 2

    def total(self, *values: Any) -> int:
        return int(sum(value.sum().item() for value in values))

    def is_all(self, value: Any, number: int) -> bool:
        return bool((value == number).all())

    def pack(self, size: int) -> Any:
        many = torch.arange(size * 2, device="cuda").view(size, 2)
        return {
            "view": many.t(),
            "odd": torch.arange(7, dtype=torch.uint8, device="cuda"),
            "none": torch.empty(0, 3, device="cuda"),
            "host": torch.ones(3),
            "twice": (many[0], many[0]),
            "text": "x" * size,
        }

    def unpack(self, value: Any) -> Any:
        kinds = [each.device.type for each in (value["view"], value["odd"], value["none"], value["host"])]
        return kinds, value["view"].sum().item(), value["odd"].tolist(), value["none"].shape, len(value["text"])

    def keep(self, value: Any) -> bool:
        self._kept.append((value, value.clone()))
        return all(torch.equal(one, other) for one, other in self._kept)

    def drop(self) -> None:
        self._kept.clear()

    def fail_if_odd(self, size: int) -> Any:
        if size % 2:
            raise KeyError(size)
        return torch.arange(size, device="cuda")

    def limit(self, num_bytes: int) -> None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


Remote = crossfade.remote(Worker)


session = opened("module", num_gpus=2)


@pytest.fixture(autouse=True)
def torn_down(request: Any) -> Iterator[None]:
    """No graph outlives its test."""
    yield
    if "session" in request.fixturenames:
        for graph in list(sessions.require().graphs):
            graph.teardown(timeout=30)


@pytest.fixture(scope="module")
def pair(session: None) -> list[Any]:
    return [Remote.options(num_gpus=1).remote() for _ in range(2)]


@pytest.fixture(params=TRANSPORTS, ids=str)
def transport(request: Any) -> Any:
    return request.param


def chain(pair: list[Any], transport: Any, **options: Any) -> Any:
    """There and back."""
    first, second = pair
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        doubled = second.double.bind(made).with_tensor_transport(transport)
        return crossfade.MultiOutputNode([first.total.bind(doubled), second.total.bind(made)]).compile(**options)


def expected(size: int) -> list[int]:
    return [size * (size - 1), size * (size - 1) // 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes(pair: list[Any], transport: Any, dtype: str) -> None:
    first, second = pair
    graph = second.on_host.bind(first.of_dtype.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
    assert graph.plan.channel["n0"].transport == transport
    tensor = torch.arange(1, 1000).remainder(100).to(getattr(torch, dtype))
    wanted = tensor if tensor.dtype.itemsize != 1 else tensor.view(torch.uint8)
    for _ in range(3):
        assert torch.equal(graph.execute(dtype).get(timeout=60), wanted)


@pytest.mark.parametrize("options", [{}, {"max_inflight": 1}, {"overlap": True}], ids=str)
def test_changing_lengths(pair: list[Any], transport: Any, options: dict[str, Any]) -> None:
    sizes = [0, 1, 10, 1000, 5, 100_000, 20_000_000, 7, 20_000_000, 3]
    check_lengths(chain(pair, transport, **options), sizes, expected, timeout_s=60)


@pytest.mark.parametrize("overlap", [False, True])
def test_values_that_are_computed_late_never_come_early(pair: list[Any], transport: Any, overlap: bool) -> None:
    first, second = pair
    with crossfade.InputNode() as given:
        late = first.make_late.bind(given.number, given.size).with_tensor_transport(transport)
        graph = second.is_all.bind(late, given.number).compile(overlap=overlap)
    refs: list[Any] = []
    for number in range(500):
        refs.append(graph.execute(number=number, size=(1, 1000, 3_000_000)[number % 3]))
        if len(refs) == graph.plan.max_inflight:
            assert refs.pop(0).get(timeout=60) is True
    assert all(ref.get(timeout=60) for ref in refs)


def test_values_that_hold_tensors_among_other_things(pair: list[Any], transport: Any) -> None:
    first, second = pair
    graph = second.unpack.bind(first.pack.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
    for size in (1, 3, 100_000):
        kinds, total, odd, none, length = graph.execute(size).get(timeout=60)
        assert kinds == ["cuda", "cuda", "cuda", "cpu"]
        assert total == size * (2 * size - 1)
        assert (odd, tuple(none), length) == (list(range(7)), (0, 3), size)


def test_cpu_tensors_arrive_on_the_gpu_of_who_wants_them_there(pair: list[Any], transport: Any) -> None:
    first, second = pair
    with crossfade.InputNode() as given:
        packed = first.pack.bind(given).with_tensor_transport(transport, device="cuda")
        graph = second.unpack.bind(packed).compile(record=True)
    for size in (1, 3, 100_000):
        kinds, total, _, _, length = graph.execute(size).get(timeout=60)
        assert (kinds, total, length) == (["cuda"] * 4, size * (2 * size - 1), size)
    spans = [span for span in graph.timeline().spans if span.stream == "down" and span.size_bytes == 12]
    assert [span.execution for span in spans] == [0, 1, 2]


def test_a_measured_timeline_has_what_moves(pair: list[Any], transport: Any) -> None:
    graph, sizes = chain(pair, transport, record=True), [1000, 3_000_000]
    assert [crossfade.get(graph.execute(size), timeout=60) for size in sizes] == [expected(size) for size in sizes]
    first, second = graph.plan.devices
    ways = {
        "copy": [(first, "push", "write n0"), (second, "push", "write n1")],
        "staged": [
            (first, "up", "send n0"),
            (second, "down", "recv n0"),
            (second, "up", "send n1"),
            (first, "down", "recv n1"),
        ],
        "nccl": [
            (first, "nccl", "send n0"),
            (second, "nccl", "recv n0"),
            (second, "nccl", "send n1"),
            (first, "nccl", "recv n1"),
        ],
    }[str(transport)]
    moved: dict[Any, int] = {}
    for span in graph.timeline().spans:
        if span.stream in ("push", "up", "down", "nccl"):
            assert span.start_us <= span.end_us
            way = span.actor, span.stream, span.label, span.execution
            moved[way] = moved.get(way, 0) + span.size_bytes
    assert moved == {(*way, number): 8 * size for way in ways for number, size in enumerate(sizes)}


def test_kept_tensors_stay_whole_also_after_teardown(pair: list[Any], transport: Any) -> None:
    first, second = pair
    for _ in range(2):
        graph = second.keep.bind(first.make.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
        assert all(graph.execute(size).get(timeout=60) for size in (10, 20, 3_000_000, 4, 3_000_000))
        graph.teardown(timeout=60)
    crossfade.get(second.drop.remote())


def test_a_method_that_raises_before_it_sends_costs_one_execution(pair: list[Any], transport: Any) -> None:
    first, second = pair
    graph = second.total.bind(first.fail_if_odd.bind(crossfade.InputNode()).with_tensor_transport(transport)).compile()
    check_odd_ones_fail(graph, lambda size: size * (size - 1) // 2, timeout_s=60)


WAYS = [*TRANSPORTS, "auto", "shm", "gloo"]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_value_that_breaks_its_static_shape_costs_one_execution(pair: list[Any], way: Any, overlap: bool) -> None:
    first, second = pair
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(way, static_shape=True)
        own = first.total.bind(made)
        graph = crossfade.MultiOutputNode([second.total.bind(made), own]).compile(overlap=overlap, max_inflight=4)
    wanted = [499_500, 499_500]
    for size in (1000, 1000, 999, 1000, 3_000_000, 0, 1000):
        refs = graph.execute(size)
        if size == 1000:
            assert crossfade.get(refs, timeout=60) == wanted
            continue
        for ref in refs:  # nothing wrong is delivered, to the other GPU or to the same actor
            with pytest.raises(
                StaticShapeError, match=rf"\(node n0\).*\(\(1000,\), torch.int64\).*found \[\(\({size},\)"
            ):
                ref.get(timeout=60)
    sizes = [1000, 5, 1000, 3_000_000]
    for size, refs in zip(sizes, [graph.execute(size) for size in sizes], strict=True):
        if size == 1000:
            assert crossfade.get(refs, timeout=60) == wanted
        else:
            with pytest.raises(StaticShapeError):
                crossfade.get(refs, timeout=60)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_static_shapes_of_tensors_among_other_things(pair: list[Any], way: Any) -> None:
    first, second = pair
    with crossfade.InputNode() as given:
        packed = first.pack.bind(given).with_tensor_transport(way, static_shape=True)
        graph = second.unpack.bind(packed).compile()
    for size in (3, 3, 4, 3, 100_000, 3):
        if size == 3:
            assert graph.execute(size).get(timeout=60)[1] == size * (2 * size - 1)
        else:
            with pytest.raises(StaticShapeError, match=rf"\(\(2, {size}\), torch.int64\)"):
                graph.execute(size).get(timeout=60)


def test_an_input_of_static_shape_that_a_gpu_reads(pair: list[Any]) -> None:
    with crossfade.InputNode() as given:
        given.with_tensor_transport(device="cuda", static_shape=True)
        graph = pair[0].total.bind(given).compile()
    assert graph.execute(torch.ones(10)).get(timeout=60) == 10
    with pytest.raises(StaticShapeError):
        graph.execute(torch.ones(11))
    assert graph.execute(torch.ones(10)).get(timeout=60) == 10


def test_teardown_with_executions_in_flight(pair: list[Any], transport: Any) -> None:
    for _ in range(3):
        graph = chain(pair, transport)
        refs = [graph.execute(3_000_000) for _ in range(5)]
        graph.teardown(timeout=60)
        del refs
    assert crossfade.get(chain(pair, transport).execute(3), timeout=60) == expected(3)


def test_who_has_no_memory_gets_an_error_and_the_graph_goes_on(pair: list[Any]) -> None:
    first, second = pair
    graph = second.total.bind(first.make.bind(crossfade.InputNode()).with_tensor_transport("staged")).compile()
    assert graph.execute(1000).get(timeout=60) == 499_500
    crossfade.get(second.limit.remote(256 << 20))
    try:
        with pytest.raises(DeviceError, match="there is no memory for a value of 800000000 bytes"):
            graph.execute(100_000_000).get(timeout=60)
        assert graph.execute(1000).get(timeout=60) == 499_500
    finally:
        crossfade.get(second.limit.remote(1 << 60))
    assert graph.execute(100_000_000).get(timeout=60) == 4_999_999_950_000_000
