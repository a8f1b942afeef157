"""The watchdog, captures, boards, streams and missing packages, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from crossfade.device import borrowed, cuda, cuda_bindings
from crossfade.device.capture import capture
from crossfade.device.fake import FakeDriver, Fault, Machine
from crossfade.device.memory import OpenedMemory, Pool
from crossfade.device.records import Enqueued
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import Counter, DeviceBoard, HostBoard, Signal
from crossfade.device.streams import Role, Streams
from crossfade.device.watchdog import DeathReport, Watchdog, release
from crossfade.errors import ChannelBroken, DeviceError, MissingDependency
from crossfade.host.memory import Memory
from crossfade.host.processes import await_end, open_pidfd


class RunningDriver(FakeDriver):
    """A fake whose device runs whenever it is looked at."""

    def is_idle(self, stream: int) -> bool:
        run(self.machine)
        return super().is_idle(stream)


def run(machine: Machine) -> None:
    while ready := [name for name, queue in machine.queues.items() if queue and machine.can_run(queue[0])]:
        machine.run(ready[0])


@pytest.fixture
def driver() -> RunningDriver:
    return RunningDriver(Machine(is_strict=False), "process")


@pytest.fixture
def board(driver: RunningDriver) -> Iterator[HostBoard]:
    memory = Memory.create("signals", 65536)
    yield HostBoard(driver, memory, 64, "test")
    memory.close()


def test_release_lets_streams_go_and_says_what_they_waited_for(driver: RunningDriver, board: HostBoard) -> None:
    first, second = driver.create_stream("first"), driver.create_stream("second")
    signal, other, counter = board.signal(0, "a signal"), board.signal(1, "another"), board.counter(2, "a counter")
    for _ in range(3):
        signal.wait(first)
    counter.wait(second, 7)
    report = release(driver, "b", lambda: [signal, other, counter], [first, second])
    assert report.is_free
    assert set(report.waited_for) == {"a signal", "a counter"}
    assert "b died, and streams here waited for" in str(report)


def test_release_gives_up_in_the_end(driver: RunningDriver, board: HostBoard) -> None:
    stream = driver.create_stream("first")
    board.signal(0, "of somebody else").wait(stream)
    report = release(driver, "b", list, [stream], limit_s=0.05)
    assert not report.is_free
    assert report.waited_for == ()
    assert "could not be let go" in str(report)


@pytest.mark.timeout(20)
def test_a_watchdog_names_the_peer_that_was_killed(driver: RunningDriver) -> None:
    pool, use = Pool(driver), driver.create_stream("use")
    memory = Memory.create("signals", 65536)
    board = HostBoard(driver, memory, num_signals(2), "ring")
    ring = RingReceiver(driver, pool, board, lambda record: None, "ring", slot_bytes=64)
    ring.accept(Enqueued(0, 0, 8), use)
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watchdog, pidfd, reports, died = Watchdog(driver), open_pidfd(peer.pid), list[DeathReport](), threading.Event()

    def on_death(report: DeathReport) -> None:
        reports.append(report)
        died.set()

    watchdog.watch("worker 7", pidfd, ring.signals, [use], on_death)
    peer.kill()
    assert died.wait(15)
    peer.communicate()
    watchdog.close()
    watchdog.close()
    os.close(pidfd)
    memory.close()
    assert reports[0].waited_for == ("full[0] of ring",)
    assert reports[0].is_free
    ring.break_off(str(reports[0]))
    with pytest.raises(ChannelBroken, match="worker 7 died, and streams here waited for full"):
        ring.accept(Enqueued(0, 1, 8), use)


@pytest.fixture
def killed() -> Iterator[int]:
    """The descriptor of a process that has been killed."""
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = open_pidfd(peer.pid)
    peer.kill()
    yield pidfd
    os.close(pidfd)
    peer.communicate()


@pytest.mark.timeout(20)
def test_waits_that_come_after_a_death_are_let_go_until_the_peer_is_forgotten(
    driver: RunningDriver, board: HostBoard, killed: int
) -> None:
    stream, signal, watchdog = driver.create_stream("use"), board.signal(0, "a signal"), Watchdog(driver)
    died = threading.Event()
    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: died.set())
    assert died.wait(5)
    for _ in range(3):
        signal.wait(stream)
    end = time.monotonic() + 15
    while not driver.is_idle(stream):
        assert time.monotonic() < end
    watchdog.forget(killed)
    run(driver.machine)
    signal.preset(0)
    signal.wait(stream)
    assert not driver.is_idle(stream)
    watchdog.close()
    assert not driver.is_idle(stream)


@pytest.mark.timeout(20)
def test_who_raises_when_it_hears_of_a_death_does_not_stop_the_watchdog(
    driver: RunningDriver, killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    watchdog, died, second = Watchdog(driver), threading.Event(), os.dup(killed)

    def fail(report: DeathReport) -> None:
        raise KeyError("planted")

    watchdog.watch("worker 7", killed, list, [], fail)
    watchdog.watch("worker 8", second, list, [], lambda report: died.set())
    assert died.wait(5)
    watchdog.close()
    os.close(second)
    assert [str(error) for error in raised] == ["'planted'"]
    assert {report.peer for report in watchdog.reports} == {"worker 7", "worker 8"}


@pytest.mark.timeout(20)
def test_a_death_is_told_before_the_first_signal_is_released(
    driver: RunningDriver, board: HostBoard, killed: int
) -> None:
    """In the watchdog's thread, which holds no lock then: another thread may forget a peer meanwhile."""
    stream, signal, watchdog = driver.create_stream("use"), board.signal(0, "a signal"), Watchdog(driver)
    signal.wait(stream)
    seen: list[object] = []
    died = threading.Event()

    def before() -> None:
        other = threading.Thread(target=watchdog.forget, args=(-1,))
        other.start()
        other.join(5)
        seen.extend((other.is_alive(), driver.is_idle(stream), signal.is_set(), threading.current_thread().name))

    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: died.set(), before)
    assert died.wait(5)
    watchdog.close()
    assert seen == [False, False, False, "crossfade-watchdog"]
    assert watchdog.reports[0].waited_for == ("a signal",)


@pytest.mark.timeout(20)
def test_streams_are_let_go_also_where_telling_raises(
    driver: RunningDriver, board: HostBoard, killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    stream, signal, watchdog = driver.create_stream("use"), board.signal(0, "a signal"), Watchdog(driver)
    signal.wait(stream)
    died = threading.Event()

    def fail() -> None:
        raise KeyError("planted")

    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: died.set(), fail)
    assert died.wait(5)
    watchdog.close()
    assert [str(error) for error in raised] == ["'planted'"]
    assert watchdog.reports[0].is_free


@pytest.mark.timeout(20)
def test_a_peer_that_is_forgotten_while_its_death_is_told_is_left_alone(
    driver: RunningDriver, board: HostBoard, killed: int
) -> None:
    signal, watchdog, told = board.signal(0, "a signal"), Watchdog(driver), threading.Event()

    def before() -> None:
        watchdog.forget(killed)
        told.set()

    watchdog.watch("worker 7", killed, lambda: [signal], [], lambda report: None, before)
    assert told.wait(5)
    watchdog.close()
    assert watchdog.reports == []
    assert not signal.is_set()


@pytest.mark.timeout(20)
def test_a_stream_that_waits_for_two_who_died_together_is_let_go_at_once(
    driver: RunningDriver, board: HostBoard, killed: int
) -> None:
    """And the first death is told before any signal is set."""
    stream, first, second = driver.create_stream("use"), board.signal(0, "the first"), board.signal(1, "the second")
    for signal in (first, second, first):
        signal.wait(stream)
    told: list[bool] = []
    watchdog, died, other = Watchdog(driver), threading.Semaphore(0), os.dup(killed)
    for name, pidfd, signal in (("worker 7", killed, first), ("worker 8", other, second)):
        await_end(pidfd, 10)
        signals = [signal]
        watchdog.watch(
            name,
            pidfd,
            lambda signals=signals: signals,  # type: ignore[misc]
            [stream],
            lambda report: died.release(),
            lambda: told.append(first.is_set() or second.is_set()),
        )
    assert died.acquire(timeout=15)
    assert died.acquire(timeout=15)
    watchdog.close()
    os.close(other)
    assert told[0] is False
    assert all(report.is_free and report.release_s < 1 for report in watchdog.reports)
    assert {report.waited_for for report in watchdog.reports} == {("the first",), ("the second",)}


@pytest.mark.timeout(20)
def test_who_forgets_a_peer_that_has_just_died_waits_until_streams_are_let_go(
    driver: RunningDriver, board: HostBoard, killed: int
) -> None:
    stream, signal, watchdog = driver.create_stream("use"), board.signal(0, "a signal"), Watchdog(driver)
    signal.wait(stream)
    told = threading.Event()
    watchdog.watch("worker 7", killed, lambda: [signal], [stream], lambda report: None, told.set)
    assert told.wait(5)
    watchdog.forget(killed)
    assert driver.is_idle(stream)
    assert watchdog.reports[0].is_free
    watchdog.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_late", [False, True])
def test_signals_that_fail_do_not_keep_others_from_being_let_go(
    driver: RunningDriver, board: HostBoard, killed: int, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """At once, or when the streams have run dry and signals are only kept set. It is printed once."""
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    stream, signal, watchdog = driver.create_stream("use"), board.signal(0, "a signal"), Watchdog(driver)
    has_failed, died, other = threading.Event(), threading.Semaphore(0), os.dup(killed)
    is_failing = not is_late

    def fail() -> list[Signal]:
        if is_failing:
            has_failed.set()
            raise ValueError("these signals are closed")
        return []

    watchdog.watch("worker 7", killed, fail, [], lambda report: died.release())
    if is_late:
        assert died.acquire(timeout=15)
        is_failing = True
    assert has_failed.wait(5)
    signal.wait(stream)
    watchdog.watch("worker 8", other, lambda: [signal], [stream], lambda report: died.release())
    end = time.monotonic() + 15
    while not driver.is_idle(stream):
        assert time.monotonic() < end
    assert died.acquire(timeout=15)
    watchdog.forget(killed)
    watchdog.close()
    os.close(other)
    assert [str(error) for error in raised] == ["these signals are closed"]
    assert [report.peer for report in watchdog.reports if report.is_free] == ["worker 7", "worker 8"][not is_late :]


@pytest.mark.timeout(20)
def test_who_closes_signals_of_the_dead_waits_for_the_step_that_sets_them(driver: RunningDriver, killed: int) -> None:
    """Also where the peer is not forgotten, since others still wait for it."""
    watchdog, is_in, may_go = Watchdog(driver), threading.Event(), threading.Event()

    class Slow:
        label = "a signal"

        def is_set(self) -> bool:
            is_in.set()
            assert may_go.wait(5)
            return True

        def is_missed(self, was_released: bool) -> bool:
            return False

        def release(self) -> None: ...

    watchdog.watch("worker 7", killed, lambda: [Slow()], [], lambda report: None)
    assert is_in.wait(5)
    closer = threading.Thread(target=watchdog.pause)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    may_go.set()
    closer.join(5)
    assert not closer.is_alive()
    watchdog.close()


@pytest.mark.timeout(20)
def test_a_peer_that_is_forgotten_may_end(driver: RunningDriver) -> None:
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watchdog, pidfd = Watchdog(driver), open_pidfd(peer.pid)
    watchdog.watch("worker 7", pidfd, list, [], lambda report: None)
    watchdog.forget(pidfd)
    peer.communicate(b"\n")
    watchdog.close()
    os.close(pidfd)
    assert watchdog.reports == []


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
    near = DeviceBoard(driver, address, 64)
    stream = driver.create_stream("stream")
    for each in (board, near):
        signal, counter = each.signal(3, "a signal"), each.counter(4, "a counter")
        assert isinstance(signal, Signal)
        assert isinstance(counter, Counter)
        signal.preset(0)
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
    board = DeviceBoard(driver, address, num_signals(1))
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
