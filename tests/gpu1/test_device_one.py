"""One GPU: memory, signals, capture and both kinds of ring between two processes that share it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from crossfade.device.borrowed import tensor_on  # noqa: E402
from crossfade.device.capabilities import Severity, judge, read_facts, read_topology  # noqa: E402
from crossfade.device.capture import capture  # noqa: E402
from crossfade.device.cuda import CudaDriver  # noqa: E402
from crossfade.device.events import EventPool  # noqa: E402
from crossfade.device.memory import Pool  # noqa: E402
from crossfade.device.signals import HostBoard  # noqa: E402
from crossfade.device.staged_layout import StagedLayout  # noqa: E402
from crossfade.device.watchdog import release  # noqa: E402
from crossfade.errors import DeviceError  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from crossfade.topology import Topology  # noqa: E402
from tests.helpers import device_cases as cases  # noqa: E402
from tests.helpers.device_pair import run_workers  # noqa: E402


@pytest.fixture
def driver() -> CudaDriver:
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    return CudaDriver(0)


def test_a_block_is_reused_and_freed_with_its_user(driver: CudaDriver) -> None:
    pool = Pool(driver)
    block = pool.take(1000, "a", "first")
    with pytest.raises(DeviceError, match="first"):
        pool.close()
    block.release()
    assert pool.take(1000, "b", "second") is block
    block.release()
    pool.close()
    assert driver.ledger.held() == []


@pytest.mark.timeout(20)
def test_a_host_goes_on_however_many_events_are_to_come(driver: CudaDriver) -> None:
    """CUDA lets it wait behind 56 events that a thread could wait for; of those that are only asked there may be any number."""
    memory = Memory.create("events", 4096)
    board = HostBoard(driver, memory, 1, "gate")
    gate, stream, events = board.counter(0, "gate"), driver.create_stream("gated"), EventPool(driver)
    gate.wait(stream, 1)
    pending = [events.at(stream) for _ in range(300)]
    assert not any(event.has_come() for event in pending)
    gate.set_from_host(1)
    pending.append(events.at(stream, is_waited=True))
    pending[-1].wait()
    assert all(event.has_come() for event in pending)
    del pending
    events.close()
    board.close()
    memory.close()
    driver.destroy_stream(stream)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_a_tensor_lies_in_the_memory_and_keeps_it(driver: CudaDriver, dtype: Any) -> None:
    pool = Pool(driver)
    block = pool.take(4096, "a", "test")

    class Keep:
        dropped = 0

        def __del__(self) -> None:
            Keep.dropped += 1

    tensor = tensor_on(block.address, (3, 4), dtype, 0, keep=Keep())
    assert tensor.data_ptr() == block.address
    tensor.copy_(torch.ones(3, 4, dtype=dtype))
    part = tensor[1:, 2]
    del tensor
    assert Keep.dropped == 0
    assert part.abs().to(torch.float32).sum().item() == 2
    del part
    assert Keep.dropped == 1
    block.release()
    pool.close()


def test_a_signal_is_waited_for_reset_read_and_released(driver: CudaDriver) -> None:
    memory = Memory.create("signals", 4096)
    board = HostBoard(driver, memory, 4, "test")
    first, second = driver.create_stream("first"), driver.create_stream("second")
    signal = board.signal(1, "a signal")
    signal.set(second)
    signal.wait(first)
    cases.wait_idle(driver, first)
    assert not signal.is_set()
    signal.wait(first)
    time.sleep(0.01)
    assert not driver.is_idle(first)
    report = release(driver, "nobody", lambda: [signal], [first])
    assert report.is_free
    assert report.waited_for == ("a signal",)
    for stream in (first, second):
        driver.destroy_stream(stream)
    board.close()
    memory.close()
    driver.close()
    assert driver.ledger.held() == []


def test_a_thread_without_a_context_can_enqueue_on_the_default_stream(driver: CudaDriver) -> None:
    memory = Memory.create("signals", 4096)
    board = HostBoard(driver, memory, 1, "test")
    signal = board.signal(0, "a signal")
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def act() -> None:
        try:
            signal.set(0)
            driver.is_idle(0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert signal.is_set()
    board.close()
    memory.close()


def test_a_capture_of_copies_and_signals_replays(driver: CudaDriver) -> None:
    pool = Pool(driver)
    memory = Memory.create("signals", 4096)
    board = HostBoard(driver, memory, 2, "test")
    signal = board.signal(0, "done")
    block = pool.take(4096, "a", "test")
    target = tensor_on(block.address, (512,), torch.int64, 0)
    source = torch.zeros(512, dtype=torch.int64, device="cuda")
    main, side = driver.create_stream("main"), driver.create_stream("side")

    def body() -> None:
        driver.copy(block.address, source.data_ptr(), 4096, side)
        signal.set(side)
        signal.wait(main)

    replay = capture(driver, main, body, [side])
    for number in range(50):
        source.fill_(number)
        target.fill_(-1)
        torch.cuda.synchronize()
        replay.launch(main)
        cases.wait_idle(driver, main)
        assert target.eq(number).all().item()
    replay.close()
    for stream in (main, side):
        driver.destroy_stream(stream)
    board.close()
    memory.close()
    block.release()
    del target
    pool.close()
    assert driver.ledger.held() == []


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_ring_between_two_processes(num_slots: int) -> None:
    sent, got = run_workers([cases.ring_sends, cases.ring_receives], [(0, 1, 100, num_slots), (0, 0, 100, num_slots)])
    assert got["num_wrong"] == 0
    assert got["statistics"].num_values == sent["statistics"].num_values == 100
    assert got["statistics"].num_generations > 1
    assert sent["held"] == got["held"] == []


def test_staged_between_two_processes() -> None:
    layout = StagedLayout(num_chunks=4, chunk_bytes=256 << 10)
    sent, got = run_workers([cases.staged_sends, cases.staged_receives], [(0, 1, 60, layout), (0, 0, 60, layout)])
    assert got["num_wrong"] == 0
    assert sent["held"] == got["held"] == []


def test_capabilities_and_topology_are_read() -> None:
    facts = read_facts({})
    assert facts.num_devices >= 1
    assert [finding for finding in judge(facts) if finding.severity is Severity.ERROR] == []
    topology = read_topology()
    assert Topology.from_json(topology.to_json()) == topology
    assert len({device.uuid for device in topology.devices}) == facts.num_devices
