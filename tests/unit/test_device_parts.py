"""Captures, boards, opened memory, streams, pools, records, missing packages and GPUs that fail or lie, without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.device import borrowed, cuda, cuda_bindings
from crossfade.device.capture import capture
from crossfade.device.completion import CompletionMark
from crossfade.device.driver import HOST
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import BLOCK_BYTES, OpenedMemory, Pool
from crossfade.device.records import (
    Announced,
    ChunksEnqueued,
    ChunksFreeEnqueued,
    Enqueued,
    Finished,
    FreeEnqueued,
    Offer,
    Record,
    Refused,
    Retired,
    Wanted,
    pack,
    unpack,
)
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.device.streams import Role, Streams
from crossfade.engines import device_ends, devices
from crossfade.engines.board import SIGNALS, pushes
from crossfade.engines.device_ends import DeviceEnds
from crossfade.errors import ChannelError, DeviceError, MissingDependency
from crossfade.graph.nodes import InputNode, MultiOutputNode
from crossfade.host.memory import Memory
from crossfade.plan.plan import Plan
from crossfade.testing.fake import Fault
from crossfade.topology import LinkKind
from tests.helpers.running_driver import RunningDriver, run
from tests.helpers.small_graphs import actor, call, compiled


def test_a_capture_whose_body_raises_ends_and_gives_its_events_back(driver: RunningDriver) -> None:
    main = driver.create_stream("main")

    def body() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError):
        capture(driver, main, body)
    again = capture(driver, main, lambda: None)
    again.launch(main)
    again.close()
    again.close()
    with pytest.raises(ValueError, match="closed"):
        again.launch(main)
    assert again.num_launches == 1
    assert driver.ledger.held("graph") == driver.ledger.held("event") == []


def test_signals_and_counters(driver: RunningDriver, board: HostBoard) -> None:
    stream = driver.create_stream("stream")
    signal, counter = board.signal(3, "a signal"), board.counter(4, "a counter")
    counter.reset()
    signal.set(stream)
    counter.set(stream, 2)
    counter.wait(stream, 1)
    assert driver.is_idle(stream)
    assert signal.is_set()
    assert counter.is_set()
    assert counter.has(2)
    assert not counter.has(3)
    signal.wait(stream)
    assert driver.is_idle(stream)
    assert not signal.is_set()


def test_memory_that_is_opened_twice_is_held_twice(driver: RunningDriver) -> None:
    """As on a GPU: the second opening has the address of the first, and each is closed."""
    address = driver.allocate(64, "memory")
    first, second = (OpenedMemory(driver, driver.export(address), 64, name) for name in ("first", "second"))
    assert first.address == second.address
    first.close()
    first.close()
    with pytest.raises(Fault, match="has it open"):
        driver.free(address)
    assert driver.ledger.held("opened") == ["opened: second"]
    second.close()
    driver.free(address)
    assert driver.ledger.held() == []


def test_each_role_and_peer_has_one_stream(driver: RunningDriver) -> None:
    streams = Streams(driver)
    assert streams.get(Role.PUSH) == streams.get(Role.PUSH)
    assert streams.get(Role.UP, "a") != streams.get(Role.UP, "b")
    assert len(streams.all()) == 3
    streams.close()
    assert streams.all() == []
    assert driver.ledger.held() == []


def test_without_the_bindings_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_bindings.bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingDependency, match=r"crossfade\[gpu\]"):
        cuda.CudaDriver(0)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r"crossfade\[gpu\]"):
        borrowed.torch_or_raise()


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bindings:
        @staticmethod
        def cuInit(flags: int) -> None:
            raise RuntimeError("no libcuda")

    class Package:
        driver = Bindings

    cuda_bindings.bindings.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", Package)
    with pytest.raises(DeviceError, match=r"no libcuda[\s\S]*hint: nvidia-smi"):
        cuda_bindings.bindings()


def test_a_storage_of_torch_holds_what_it_is_given_as_long_as_any_view() -> None:
    pytest.importorskip("torch")
    assert borrowed.storages_hold()


class PulseOnly(cuda.CudaDriver):
    """What `failure` asks of a GPU, which says what a test has put down for it."""

    def __init__(self) -> None:
        self._pulse = None
        self.refusals: list[str] = []  # to the calls that come, empty for none
        self.asked: list[str] = []

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.refusals and (refusal := self.refusals.pop(0)):
            raise DeviceError(f"{what} failed: {refusal}")

    def create_stream(self, label: str, *, is_urgent: bool = False) -> int:
        self._ask("creating a stream")
        return 1

    def create_event(self) -> int:
        self._ask("creating an event")
        return 2

    def has_happened(self, event: int) -> bool:
        self._ask("cuEventQuery")
        return True

    def record_event(self, event: int, stream: int) -> None:
        self._ask("cuEventRecord")


ASSERT, NO_MEMORY = "CUDA_ERROR_ASSERT: device-side assert", "CUDA_ERROR_OUT_OF_MEMORY: out of memory"


def test_a_gpu_that_works_is_given_a_little_each_time() -> None:
    driver = PulseOnly()
    assert [driver.failure() for _ in range(3)] == [""] * 3
    assert driver.asked == ["creating a stream", "creating an event", *["cuEventQuery", "cuEventRecord"] * 3]


@pytest.mark.parametrize("num_before", range(6))
def test_a_gpu_that_failed_is_found_out_at_whatever_it_is_asked_first(num_before: int) -> None:
    driver = PulseOnly()
    driver.refusals = [*[""] * num_before, *[ASSERT] * 10]
    failures = [driver.failure() for _ in range(3)]
    assert next(filter(None, failures)).endswith(ASSERT)
    assert failures[-1]


def test_a_gpu_without_memory_for_the_question_has_not_failed() -> None:
    driver = PulseOnly()
    driver.refusals = [NO_MEMORY, NO_MEMORY, ""]
    assert [driver.failure() for _ in range(3)] == [""] * 3
    assert driver.asked[-2:] == ["cuEventQuery", "cuEventRecord"]


class Small:
    """A device with room for so many bytes; a cache beside the pool holds some of them."""

    def __init__(self, free_bytes: int, cached_bytes: int) -> None:
        self.free_bytes, self.cached_bytes = free_bytes, cached_bytes
        self.num_reclaimed = 0
        self._sizes: dict[int, int] = {}

    def allocate(self, size_bytes: int, label: str) -> int:
        if size_bytes > self.free_bytes:
            raise DeviceError(f"no {size_bytes} bytes for {label}")
        self.free_bytes -= size_bytes
        address = (len(self._sizes) + 1) << 40
        self._sizes[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        self.free_bytes += self._sizes[address]

    def reclaim(self) -> None:
        self.num_reclaimed += 1
        self.free_bytes, self.cached_bytes = self.free_bytes + self.cached_bytes, 0


def pool_on(device: Any) -> Pool:
    return Pool(device, device.reclaim)


def test_what_others_keep_unused_is_asked_for_last() -> None:
    device = Small(2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    pool = pool_on(device)
    pool.take(BLOCK_BYTES, "slots", "a").release()
    pool.take(2 * BLOCK_BYTES, "slots", "b")  # the idle block is enough
    assert (device.num_reclaimed, pool.idle_bytes) == (0, 0)
    pool.take(2 * BLOCK_BYTES, "slots", "c")
    assert (device.num_reclaimed, device.free_bytes) == (1, 0)


def test_no_memory_even_so() -> None:
    device = Small(BLOCK_BYTES, BLOCK_BYTES)
    pool = pool_on(device)
    with pytest.raises(DeviceError, match="for slots of n0"):
        pool.take(3 * BLOCK_BYTES, "slots of n0", "a")
    assert device.num_reclaimed == 1
    assert pool.used_bytes == 0
    pool.take(2 * BLOCK_BYTES, "slots of n0", "a")


def test_a_pool_that_nobody_can_help() -> None:
    device: Any = Small(BLOCK_BYTES, BLOCK_BYTES)
    with pytest.raises(DeviceError):
        Pool(device).take(2 * BLOCK_BYTES, "slots", "a")
    assert device.num_reclaimed == 0


@pytest.mark.parametrize("is_initialized", [True, False])
def test_torchs_cache_is_emptied_where_it_has_one(is_initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    cuda = SimpleNamespace(is_initialized=lambda: is_initialized, empty_cache=lambda: emptied.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(devices, "_host_driver", lambda: Small(0, 0))
    pool = devices.Devices((), lambda peer: [], lambda peer: None).homes[0].pool
    with pytest.raises(DeviceError):
        pool.take(1, "slots", "a")
    assert len(emptied) == is_initialized


RECORDS: list[Record] = [
    Enqueued(3, 1, 1 << 40),
    FreeEnqueued(2, 7),
    Wanted(12345),
    Offer(4, 2, 3, 1 << 33, bytes(range(64))),
    Retired(9, 1 << 35),
    Finished(),
    Refused(1 << 40, "kein Speicher für 3 GB"),
    Announced(0),
    ChunksEnqueued(5),
    ChunksFreeEnqueued(6),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_from_its_bytes(record: Record) -> None:
    data = pack(record)
    assert len(data) <= 100
    assert unpack(data) == record
    longer = bytes([data[0] + 1]) + data[1:] + b"\x00"
    for wrong in (data[:-1], data + b"x", b"\xff" + data[1:], b"", longer):
        with pytest.raises(ChannelError):
            unpack(wrong)


def test_numbers_of_records_are_not_negative() -> None:
    with pytest.raises(ChannelError):
        unpack(pack(Wanted(-1)))


def test_a_long_reason_is_cut() -> None:
    reason = "ein größerer Speicher " * 10
    data = pack(Refused(1 << 40, reason))
    assert len(data) <= 100
    cut = unpack(data)
    assert isinstance(cut, Refused)
    assert len(cut.reason) > 70
    assert reason.startswith(cut.reason)


def test_what_others_enqueue_is_none_of_it(driver: RunningDriver, board: HostBoard) -> None:
    """Whether or not somebody asked before its own work was over."""
    own, others, stream = board.counter(0, "own"), board.counter(1, "others"), driver.create_stream("shared")
    tail = CompletionMark(driver, [stream])
    for number, is_asked_early in enumerate([True, False, False, True, False], 1):
        own.wait(stream, number)
        tail.is_longer = True
        if is_asked_early:  # then the end of its work is marked, and the others' comes behind that
            assert not tail.has_passed()
        board.poke(0, number)
        run(driver.machine)
        assert tail.has_passed()
        others.wait(stream, number)
        assert tail.has_passed()
        board.poke(1, number)
        run(driver.machine)
        assert tail.has_passed()
    tail.close()
    assert driver.ledger.held("event") == []


class Opened(Exception):
    """The check was passed: what comes next was begun."""


def fan_out(gpus: dict[str, tuple[int, ...]], transport: str = "auto") -> Plan:
    """A gives a value to B and C, and takes what B makes of it."""
    a, b, c = (actor(name, *gpus[name]) for name in "ABC")
    made = call(a, "take", InputNode()).with_tensor_transport(transport)
    outputs = [call(a, "take", call(b, "take", made)), call(c, "take", made)]
    return compiled(MultiOutputNode(outputs))


@pytest.mark.parametrize(
    ("gpus", "of_a", "of_b"),
    [
        ({"A": (0,), "B": (1,), "C": (2,)}, [(0, 1), (0, 2)], [(1, 0)]),
        ({"A": (0,), "B": (1,), "C": (1,)}, [(0, 1)], [(1, 0)]),
        ({"A": (0, 1), "B": (2, 3), "C": (2,)}, [(0, 2), (1, 3), (1, 2)], [(2, 0), (3, 1)]),
        ({"A": (0,), "B": (), "C": (0,)}, [(0, 0)], []),
    ],
)
def test_pushes(gpus: dict[str, tuple[int, ...]], of_a: list[tuple[int, int]], of_b: list[tuple[int, int]]) -> None:
    plan = fan_out(gpus)
    assert (pushes(plan, "A"), pushes(plan, "B"), pushes(plan, "C")) == (of_a, of_b, [])
    assert pushes(fan_out({"A": (), "B": (), "C": ()}, "copy"), "A") == []


@pytest.mark.parametrize("kind", LinkKind)
@pytest.mark.parametrize("is_host", [False, True])
def test_copies_over_anything_but_nvlink_are_refused(
    kind: LinkKind, is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def streams(ends: Any) -> None:
        raise Opened

    links = {(0, 1): LinkKind.NVLINK, (0, 2): kind, (1, 0): kind}
    monkeypatch.setattr(device_ends, "read_facts", lambda: SimpleNamespace(links=links))
    monkeypatch.setattr(DeviceEnds, "_make_streams", streams)
    plan = fan_out({"A": (0,), "B": (1,), "C": (2,)})
    devices: Any = SimpleNamespace(homes=[SimpleNamespace(device=0, is_host=is_host)])
    wanted = Opened if is_host or kind is LinkKind.NVLINK else DeviceError
    for party, pair in {"A": "GPU 0 and GPU 2", "B": "GPU 1 and GPU 0"}.items():
        with pytest.raises(wanted) as caught:
            DeviceEnds(plan, party, {}, devices, {}, lambda delay_s: None)
        if wanted is DeviceError:
            assert str(caught.value).startswith(f"{pair} are not linked by NVLink")
            assert "\nhint: 'staged' goes through the host" in str(caught.value)
    with pytest.raises(Opened):  # C pushes nothing
        DeviceEnds(plan, "C", {}, devices, {}, lambda delay_s: None)


def test_boards_are_closed_where_the_streams_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(ends: Any) -> None:
        raise Opened

    monkeypatch.setattr(DeviceEnds, "_make_streams", refuse)
    driver = HostDriver(1.0)
    devices: Any = SimpleNamespace(homes=[SimpleNamespace(device=HOST, is_host=True, driver=driver)])
    memory = Memory.create("signals", WORD_BYTES)
    with pytest.raises(Opened):
        DeviceEnds(
            fan_out({"A": (), "B": (), "C": ()}, "copy"), "A", {SIGNALS: memory}, devices, {}, lambda delay_s: None
        )
    assert driver.ledger.held() == []
