"""One GPU: spans of its streams lie where the host's clock says that they must, and are as long as CUDA's own events say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from crossfade.device.cuda import CudaDriver  # noqa: E402
from crossfade.device.signals import HostBoard  # noqa: E402
from crossfade.host.memory import Memory  # noqa: E402
from crossfade.plan.actions import Action, Verb  # noqa: E402
from crossfade.plan.device_streams import DeviceStream  # noqa: E402
from crossfade.plan.timeline import Timeline  # noqa: E402
from crossfade.runtime.device_clock import DeviceClock  # noqa: E402
from crossfade.runtime.device_record import DeviceRecorder  # noqa: E402
from crossfade.runtime.nvtx import find_ranges  # noqa: E402
from crossfade.runtime.record import Recorder  # noqa: E402

SLEEP_CYCLES = 10_000_000  # some milliseconds
COPY_BYTES = 1 << 30  # 0.5 ms or more within one device
SLACK_US = 30.0
"""How far the two clocks may be from each other: a few microseconds were seen between an event and the host that asks for it."""
RUN, WRITE = Action(Verb.RUN, "n0"), Action(Verb.WRITE, "n0")


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    torch.cuda.set_device(0)
    torch.cuda._sleep(1_000)
    torch.cuda.synchronize()
    made = CudaDriver(0)
    yield made
    made.close()
    assert made.ledger.held() == []


@pytest.fixture
def recorder() -> Recorder:
    return Recorder("A", time.monotonic_ns())


@pytest.fixture
def device(driver: CudaDriver, recorder: Recorder) -> Iterator[DeviceRecorder]:
    made = DeviceRecorder(driver, recorder, max_spans=64)
    yield made
    made.close()


def test_the_clocks_are_read_together(driver: CudaDriver) -> None:
    clock = DeviceClock(driver)
    reading = clock.read()
    assert reading is not None
    assert reading.error_ns < SLACK_US * 1e3
    clock.close()


def test_a_kernel_lies_within_the_host_s_bracket_and_is_as_long_as_it_ran(
    device: DeviceRecorder, recorder: Recorder
) -> None:
    stream = torch.cuda.Stream()
    brackets, lengths_us = [], []
    with torch.cuda.stream(stream):
        for _ in range(5):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_us = (time.monotonic_ns() - recorder.origin_ns) / 1e3

            def work(first: Any = first, last: Any = last) -> bool:
                first.record()
                torch.cuda._sleep(SLEEP_CYCLES)
                last.record()
                return True

            torch.cuda._sleep(SLEEP_CYCLES)  # the host enqueues all of it meanwhile
            assert device.wrap(work, RUN, "A.f", stream.cuda_stream)()
            stream.synchronize()
            brackets.append((start_us, (time.monotonic_ns() - recorder.origin_ns) / 1e3))
            lengths_us.append(first.elapsed_time(last) * 1e3)
    spans = device.spans()
    for span, (start_us, end_us), length_us in zip(spans, brackets, lengths_us, strict=True):
        assert start_us - SLACK_US < span.start_us < span.end_us < end_us + SLACK_US
        assert span.duration_us == pytest.approx(length_us, abs=SLACK_US)


def test_spans_that_are_asked_for_later_lie_where_they_lay(driver: CudaDriver, device: DeviceRecorder) -> None:
    for _ in range(4):
        opened = device.begin(0)
        torch.cuda._sleep(100_000)
        device.end(opened, DeviceStream.COMPUTE, RUN, "A.f", 0)
    torch.cuda.synchronize()
    before = device.spans()
    time.sleep(2)  # the time that passes is what is tested
    for first, later in zip(before, device.spans(), strict=True):
        assert later.start_us == pytest.approx(first.start_us, abs=2 * SLACK_US)


def test_a_copy_beside_a_kernel_is_hidden(driver: CudaDriver, device: DeviceRecorder) -> None:
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    compute, push = torch.cuda.Stream(), driver.create_stream("push", is_urgent=True)
    torch.cuda.synchronize()
    kernel = device.begin(compute.cuda_stream)
    with torch.cuda.stream(compute):
        torch.cuda._sleep(SLEEP_CYCLES)
    device.end(kernel, DeviceStream.COMPUTE, RUN, "A.f", 0)
    end = device.around(DeviceStream.PUSH, WRITE, "n0")(push)
    driver.copy(target.data_ptr(), source.data_ptr(), COPY_BYTES, push)
    end(COPY_BYTES)
    torch.cuda.synchronize()
    timeline = Timeline.of("measured", device.spans())
    assert [span.size_bytes for span in timeline.spans if span.stream == "push"] == [COPY_BYTES]
    assert timeline.communicate_us("A") > 300
    assert timeline.exposed_us("A") < 0.2 * timeline.communicate_us("A")
    driver.destroy_stream(push)


def test_a_stream_that_waits_holds_up_nobody_who_asks(driver: CudaDriver, device: DeviceRecorder) -> None:
    memory = Memory.create("signals", 4096)
    board = HostBoard(driver, memory, 1, "test")
    counter, stream = board.counter(0, "a counter"), driver.create_stream("stream")
    opened = device.begin(stream)
    counter.wait(stream, 1)
    device.end(opened, DeviceStream.COMPUTE, RUN, "A.f", 0)
    begin = time.monotonic()
    assert device.spans() == []
    assert time.monotonic() - begin < 1
    counter.release()
    driver.synchronize(stream)
    (span,) = device.spans()
    assert span.duration_us > 0
    driver.destroy_stream(stream)
    board.close()
    memory.close()


def test_the_oldest_spans_are_forgotten(driver: CudaDriver, device: DeviceRecorder) -> None:
    held = driver.ledger.held("event")
    for execution in range(200):
        opened = device.begin(0)
        device.end(opened, DeviceStream.COMPUTE, RUN, "A.f", execution)
    torch.cuda.synchronize()
    assert [span.execution for span in device.spans()] == list(range(136, 200))
    assert driver.ledger.held("event") == held


def test_torch_with_cuda_makes_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFADE_NVTX", "1")
    ranges = find_ranges()
    assert ranges is not None
    assert ranges.wrap(lambda: True, "A.f (node n0)")()
