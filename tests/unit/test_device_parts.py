"""Captures, boards, opened memory, streams, missing packages and GPUs that fail, without a GPU."""

from __future__ import annotations

import sys

import pytest

from crossfade.device import borrowed, cuda, cuda_bindings
from crossfade.device.capture import capture
from crossfade.device.memory import OpenedMemory, Pool
from crossfade.device.records import Enqueued
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import Counter, HostBoard, Signal, SignalBoard
from crossfade.device.streams import Role, Streams
from crossfade.errors import DeviceError, MissingDependency
from crossfade.testing.fake import Fault
from tests.helpers.running_driver import RunningDriver


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


def test_signals_and_counters_lie_on_both_kinds_of_board(driver: RunningDriver, board: HostBoard) -> None:
    address = driver.allocate(4096, "signals")
    near = SignalBoard(driver, address, 64)
    stream = driver.create_stream("stream")
    for each in (board, near):
        signal, counter = each.signal(3, "a signal"), each.counter(4, "a counter")
        assert isinstance(signal, Signal)
        assert isinstance(counter, Counter)
        counter.reset()
        signal.set(stream)
        counter.set(stream, 2)
        counter.wait(stream, 1)
        assert driver.is_idle(stream)
        assert signal.is_set()
        assert counter.is_at_least(2)
        assert counter.is_set()
        assert not counter.is_at_least(3)
        assert counter.has(2) is each.is_quick
        signal.wait(stream)
        assert driver.is_idle(stream)
        assert not signal.is_set()


def test_a_ring_works_on_signals_in_device_memory(driver: RunningDriver) -> None:
    address = driver.allocate(65536, "signals")
    board = SignalBoard(driver, address, num_signals(1))
    pool, copies, use = Pool(driver), driver.create_stream("copies"), driver.create_stream("use")
    to_sender: list[object] = []
    to_receiver: list[object] = []
    receiver = RingReceiver(driver, pool, board, to_sender.append, "ring", num_slots=1, slot_bytes=64)
    sender = RingSender(driver, board, copies, to_receiver.append, "ring")
    source = pool.take(8, "source", "test").address
    for _ in range(3):
        while to_sender:
            sender.on_record(to_sender.pop(0))  # type: ignore[arg-type]
        assert sender.try_send(source, 8)
        record = to_receiver.pop()
        assert isinstance(record, Enqueued)
        receiver.accept(record, use).release()
        assert driver.is_idle(use)
    assert receiver.statistics().num_values == 3


def test_opened_memory_is_closed_with_its_last_user(driver: RunningDriver) -> None:
    address = driver.allocate(64, "memory")
    opened = OpenedMemory(driver, driver.export(address), 64, "memory")
    assert opened.use() is opened
    opened.close()
    with pytest.raises(Fault, match="has it open"):
        driver.free(address)
    assert driver.ledger.held("opened") == ["opened: memory"]
    opened.close()
    opened.close()
    driver.free(address)
    assert driver.ledger.held() == []
    with pytest.raises(DeviceError, match="memory is closed"):
        opened.use()


def test_memory_that_is_opened_twice_is_held_twice(driver: RunningDriver) -> None:
    """As on a GPU: the second opening has the address of the first, and each is closed."""
    address = driver.allocate(64, "memory")
    first, second = (OpenedMemory(driver, driver.export(address), 64, name) for name in ("first", "second"))
    assert first.address == second.address
    first.close()
    assert driver.ledger.held("opened") == ["opened: second"]
    second.close()
    driver.free(address)


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
