"""Spans of a device on the host's clock: clocks that drift apart, a ring of events, a device with nothing but a clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest

from crossfade.device.host_driver import HostDriver
from crossfade.device.streams import Role
from crossfade.plan.actions import COLL_STREAM, Action, Verb
from crossfade.plan.device_streams import DeviceStream
from crossfade.plan.timeline import Timeline
from crossfade.runtime.device_clock import WANTED_NS, DeviceClock
from crossfade.runtime.device_record import DeviceRecorder, Opened
from crossfade.runtime.record import Recorder
from crossfade.types import CollectiveKind
from tests.helpers.clocked import Clocked, ClockedDriver, Op
from tests.helpers.clocked_peers import Ranks

RUN, WRITE = Action(Verb.RUN, "n0"), Action(Verb.WRITE, "n0")
NEVER = 1 << 50
"""A word that nobody sets."""


class SkewedDriver(ClockedDriver):
    """A device whose clock runs faster than the host's, tells the time between events as CUDA does (a float of 32 bits, in
    milliseconds), and is as quick as CUDA to do and to show things: a few microseconds.
    """

    def __init__(self, drift_ppm: float = 0.0) -> None:
        super().__init__(Clocked(), 0)
        self.rate = 1 + drift_ppm * 1e-6
        self.late: set[int] = set()
        self.others_tries = 0  # how often others have the device first, from now on
        self._draw = Random(1)

    def now_ns(self) -> int:
        return round(self.machine.now_us * 1e3)

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        others_us = self._draw.uniform(200, 400) if self.others_tries else 0.0
        self.others_tries = max(0, self.others_tries - 1)
        self.streams[stream].queue[-1].enqueued_us += others_us + self._draw.uniform(0.5, 5)

    def has_happened(self, event: int) -> bool:
        self.machine.now_us += self._draw.uniform(0.5, 4)
        return event not in self.late and super().has_happened(event)

    def elapsed_us(self, first: int, last: int) -> float:
        return float(np.float32(super().elapsed_us(first, last) * self.rate / 1e3)) * 1e3

    def work(self, stream: int, duration_us: float) -> None:
        self.enqueue(stream, Op("gemm", duration_us, (0,)), "kernel")


class Bench:
    """A recorder on such a device, and two of its streams."""

    def __init__(self, drift_ppm: float = 0.0, max_spans: int = 8) -> None:
        self.driver = SkewedDriver(drift_ppm)
        self.recorder = Recorder("A", origin_ns=0)
        self.device = DeviceRecorder(self.driver, self.recorder, max_spans=max_spans, now_ns=self.driver.now_ns)
        self.compute, self.push = self.driver.create_stream("compute"), self.driver.create_stream("push")
        self.opened: list[Opened] = []

    def span(self, stream: int, duration_us: float, execution: int = 0) -> None:
        opened = self.device.begin(stream)
        assert opened is not None
        self.driver.work(stream, duration_us)
        lane = DeviceStream.COMPUTE if stream == self.compute else DeviceStream.PUSH
        self.device.end(opened, lane, RUN, "A.f", execution)
        self.opened.append(opened)

    def wrongs_us(self) -> list[float]:
        """By how much each span begins at another time than it did, on the host's clock."""
        spans = self.device.spans()
        assert len(spans) == len(self.opened)
        begins_us = [self.driver.time_us(each.begin) for each in self.opened]
        return [abs(span.start_us - begin_us) for span, begin_us in zip(spans, begins_us, strict=True)]


@pytest.mark.parametrize(
    ("drift_ppm", "pauses_us", "most_us"),
    [
        *((drift_ppm, [pause_us] * 100, 3) for drift_ppm in (-400.0, 0.0, 400.0) for pause_us in (0.0, 1e3, 1e6)),
        (
            50.0,
            [1.8e6] * 2_000,
            10,
        ),  # an hour, in which the time since one event of the first minute is wrong by 0.1 ms
        (400.0, [*[100.0] * 10, 60e6, *[100.0] * 9], 6),  # a pause of a minute
    ],
)
def test_spans_lie_where_they_were_on_the_host_s_clock(
    drift_ppm: float, pauses_us: list[float], most_us: float
) -> None:
    bench = Bench(drift_ppm, len(pauses_us))
    for index, pause_us in enumerate(pauses_us):
        bench.span((bench.compute, bench.push)[index % 2], 50.0 + index % 100)
        bench.driver.machine.now_us += pause_us
    assert max(bench.wrongs_us()) < most_us


@pytest.mark.parametrize("reader", ["the first reading", "the second one"])
def test_a_reading_at_which_others_have_the_device_in_between_is_tried_on_until_one_bracket_is_narrow(
    reader: str,
) -> None:
    """As long as others read, too, none is: they are done after thirty tries."""
    driver = SkewedDriver()
    driver.others_tries = 30 if reader == "the first reading" else 0
    clock = DeviceClock(driver, driver.now_ns)
    driver.others_tries = 30
    reading = clock.read()
    assert reading is not None
    assert reading.error_ns <= WANTED_NS
    assert abs(reading.host_ns / 1e3 - driver.time_us(reading.timer)) < 8
    origin = clock._origin
    assert origin is not None
    assert origin.error_ns <= WANTED_NS
    clock.close()


def test_a_device_that_others_always_have_is_not_asked_for_ever() -> None:
    driver = SkewedDriver()
    driver.others_tries = 1 << 30
    clock = DeviceClock(driver, driver.now_ns)
    reading = clock.read()
    assert reading is not None
    assert WANTED_NS < reading.error_ns < 200_000
    assert driver.machine.now_us < 100_000
    clock.close()


def test_spans_are_as_long_as_what_ran() -> None:
    bench = Bench(400.0)
    for duration_us in (7.0, 150.0, 2e5):
        bench.span(bench.compute, duration_us)
    while not bench.driver.is_idle(bench.compute):
        pass
    found = [span.duration_us for span in bench.device.spans()]
    assert found == pytest.approx([7.0, 150.0, 2e5], abs=6)


def test_a_span_says_what_it_is() -> None:
    bench = Bench()
    run = bench.device.wrap(lambda: True, RUN, "A.f", bench.compute)
    around = bench.device.around(DeviceStream.PUSH, WRITE, "n0")
    for execution in range(3):
        bench.recorder.round.number = execution
        assert run()
        around(bench.push)(7)
    spans = bench.device.spans()
    assert [(span.actor, span.stream, span.label, span.what, span.kind, span.execution) for span in spans] == [
        each
        for execution in range(3)
        for each in (
            ("A", "compute", "run n0", "A.f", "compute", execution),
            ("A", "push", "write n0", "n0", "communicate", execution),
        )
    ]
    assert {type(span.stream) for span in spans} == {str}
    assert [span.size_bytes for span in spans] == [0, 7] * 3


def test_a_copy_may_belong_to_another_execution_and_none_is_recorded_after_the_end() -> None:
    bench = Bench()
    around = bench.device.around(DeviceStream.NCCL, WRITE, "n0")
    around(bench.push, execution=5)(1)
    assert [span.execution for span in bench.device.spans()] == [5]
    held = len(bench.driver.ledger.held())
    bench.device.close()
    around(bench.push)(1)
    assert len(bench.driver.ledger.held()) < held


def test_what_is_under_way_when_recording_ends_is_not_recorded_and_leaves_no_event() -> None:
    """A collective may be enqueued by another thread meanwhile."""
    bench = Bench(max_spans=2)
    opened = [bench.device.begin(bench.push), bench.device.begin(bench.compute)]
    bench.device.end(opened[0], DeviceStream.COLL, RUN, "A.f", 0)
    bench.device.close()
    bench.device.end(opened[1], DeviceStream.COLL, RUN, "A.f", 0)
    assert bench.device.begin(bench.push) is None
    bench.device.end(None, DeviceStream.COLL, RUN, "A.f", 0)
    for stream in (bench.compute, bench.push):
        bench.driver.destroy_stream(stream)
    assert bench.driver.ledger.held() == []


def test_two_threads_may_record_while_a_third_asks() -> None:
    driver = HostDriver(10.0)
    device = DeviceRecorder(driver, Recorder("A", time.monotonic_ns()), max_spans=16)
    stream = driver.create_stream("stream")

    def work(role: DeviceStream) -> None:
        for execution in range(2_000):
            device.end(device.begin(stream), role, RUN, "A.f", execution)

    with ThreadPoolExecutor(2) as pool:
        recording = [pool.submit(work, role) for role in (DeviceStream.COMPUTE, DeviceStream.COLL)]
        while not all(each.done() for each in recording):
            assert len(device.spans()) <= 16
    assert [each.result() for each in recording] == [None, None]
    assert [span.execution for span in device.spans()][-1] == 1_999
    device.close()
    driver.destroy_stream(stream)
    assert driver.ledger.held() == []


def test_spans_of_two_streams_overlap_as_the_streams_did(tmp_path: Path) -> None:
    bench = Bench()
    for _ in range(4):
        bench.span(bench.compute, 1_000.0)
        bench.span(bench.push, 400.0)
    timeline = Timeline.of("measured", bench.device.spans())
    assert [timeline.compute_us("A"), timeline.communicate_us("A")] == pytest.approx([4_000, 1_600], abs=60)
    assert timeline.exposed_us("A") < 10
    timeline.save(tmp_path / "timeline.svg")
    timeline.save(tmp_path / "timeline.json")


def test_the_oldest_spans_are_forgotten_and_nothing_is_made_on_the_way() -> None:
    bench = Bench(max_spans=4)
    held = bench.driver.ledger.held()
    for execution in range(100):
        bench.span(bench.compute, 10.0, execution)
        if execution % 30 == 0:
            bench.device.spans()
    assert bench.driver.ledger.held() == held
    bench.opened = bench.opened[-4:]
    assert [span.execution for span in bench.device.spans()] == [96, 97, 98, 99]
    assert max(bench.wrongs_us()) < 6


def test_what_has_not_ended_is_told_later() -> None:
    bench = Bench()
    bench.span(bench.compute, 10.0, 0)
    bench.driver.wait_value(bench.push, NEVER, 1)
    bench.span(bench.push, 10.0, 1)
    bench.span(bench.compute, 10.0, 2)
    assert [span.execution for span in bench.device.spans()] == [0, 2]
    bench.driver.machine.store(NEVER, 1, bench.driver.machine.now_us)
    assert [span.execution for span in bench.device.spans()] == [0, 1, 2]


def test_a_device_that_is_too_busy_for_a_reading_is_placed_by_the_first_one() -> None:
    bench = Bench()
    bench.span(bench.compute, 10.0)
    bench.driver.late = set(bench.device._clock._timers)
    before_us = bench.driver.machine.now_us
    assert max(bench.wrongs_us()) < 6
    assert bench.driver.machine.now_us - before_us < 50_000


@pytest.mark.parametrize("num_before", [1, 20])
def test_a_reading_stays_though_a_later_try_for_it_does_not_come_in_time(num_before: int) -> None:
    """Others have the device all the time: 20 tries leave it as wrong as their turns are long, as one does."""
    driver = SkewedDriver()
    driver.others_tries = 1_000
    record_event, num = driver.record_event, 0

    def stall(event: int, stream: int) -> None:
        nonlocal num
        num += 1
        driver.late = {event} if num > num_before else set()
        record_event(event, stream)

    driver.record_event = stall  # type: ignore[method-assign]
    clock = DeviceClock(driver, driver.now_ns)
    driver.late = set(clock._timers)
    reading = clock.read()
    assert num == num_before + 2
    assert reading is not None
    assert WANTED_NS < reading.error_ns < 250_000
    assert abs(reading.host_ns / 1e3 - driver.time_us(reading.timer)) < 250


def test_a_device_of_which_no_reading_was_had_gives_no_spans() -> None:
    driver = SkewedDriver()
    has_happened = driver.has_happened
    driver.has_happened = lambda event: not has_happened(event)  # type: ignore[method-assign]
    device = DeviceRecorder(driver, Recorder("A", 0), max_spans=2, now_ns=driver.now_ns)
    assert device.spans() == []
    driver.has_happened = has_happened  # type: ignore[method-assign]
    stream = driver.create_stream("compute")
    device.wrap(lambda: True, RUN, "A.f", stream)()
    (span,) = device.spans()
    assert span.start_us == pytest.approx(driver.machine.now_us, abs=100)


def test_everything_is_given_back() -> None:
    bench = Bench()
    bench.driver.destroy_stream(bench.compute)
    bench.span(bench.push, 10.0)
    bench.driver.destroy_stream(bench.push)
    bench.device.close()
    bench.device.close()
    assert bench.driver.ledger.held() == []


def test_a_step_that_raises_ends_its_span() -> None:
    bench = Bench(max_spans=1)

    def fail() -> bool:
        raise KeyError("planted")

    step = bench.device.wrap(fail, RUN, "A.f", bench.compute)
    for _ in range(3):
        with pytest.raises(KeyError, match="planted"):
            step()
    assert len(bench.device.spans()) == 1


def spend(duration_ns: int) -> None:
    end = time.monotonic_ns() + duration_ns
    while time.monotonic_ns() < end:
        pass


def test_on_a_cpu_in_the_place_of_a_device_spans_lie_within_the_host_s() -> None:
    driver, recorder = HostDriver(1.0), Recorder("A", time.monotonic_ns())
    device = DeviceRecorder(driver, recorder, max_spans=4)

    def work() -> bool:
        spend(2_000_000)
        return True

    step = recorder.wrap(device.wrap(work, RUN, "A.f", 0), RUN, "A.f")
    for execution in range(3):
        recorder.round.number = execution
        assert step()
    for inner, outer in zip(device.spans(), recorder.spans(), strict=True):
        assert inner.execution == outer.execution
        assert outer.start_us - 20 < inner.start_us < inner.end_us < outer.end_us + 20
        assert inner.duration_us >= 2_000
    device.close()
    assert driver.ledger.held() == []


@pytest.mark.parametrize("kind", CollectiveKind)
def test_a_collective_is_one_span_on_each_gpu_whatever_streams_it_goes_over(kind: CollectiveKind) -> None:
    """From when a rank's own tensors are there, one rank late, until all that is done for it is done."""
    ranks, size_bytes, late_us = Ranks(3, 3 << 20), 48 << 16, 500.0
    machine = ranks.drivers[0].machine
    recorders = [
        DeviceRecorder(driver, Recorder(f"A{rank}", 0), max_spans=4, now_ns=lambda: round(machine.now_us * 1e3))
        for rank, driver in enumerate(ranks.drivers)
    ]
    for rank, (driver, device) in enumerate(zip(ranks.drivers, recorders, strict=True)):
        if rank == 1:
            driver.enqueue(ranks.streams[rank], Op("gemm", late_us, (rank,)), "kernel")
        end = device.around(DeviceStream.COLL, Action(Verb.COLL, "c0"), str(kind))(ranks.streams[rank], 7)
        ranks.enqueue(rank, kind, size_bytes, root=0)
        end(size_bytes)
    assert all(driver.is_idle(stream) for driver in ranks.drivers for stream in driver.streams)
    found = [span for device in recorders for span in device.spans()]
    assert [(span.actor, span.stream, span.label, span.what) for span in found] == [
        (f"A{rank}", "coll", "coll c0", kind) for rank in range(3)
    ]
    assert {(span.kind, span.execution, span.size_bytes) for span in found} == {("communicate", 7, size_bytes)}
    assert found[1].start_us - found[0].start_us == pytest.approx(late_us, abs=1)
    for span, driver, lanes in zip(found, ranks.drivers, ranks.lanes, strict=True):
        ends_us = [driver.streams[stream].time_us for lane in lanes for stream in lane.streams]
        assert span.end_us == pytest.approx(max(ends_us), abs=1)
        assert span.end_us > found[1].start_us


def test_streams_are_named_after_what_they_are_for() -> None:
    """A span's stream has the name of the stream on which channels enqueue, or of the plan's stream of collectives."""
    assert {stream.value for stream in DeviceStream} == {"compute", COLL_STREAM, *(role.value for role in Role)}
