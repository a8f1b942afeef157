"""What `crossfade.record` adds to a trace: which event a call waits for, on which stream; queues and power."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crossfade.profile.doctor.diagnosis import diagnose
from crossfade.profile.doctor.view import Cause
from crossfade.profile.traces.events import Activity
from crossfade.profile.traces.launches import host_order
from crossfade.profile.traces.reader import read_trace, read_traces
from crossfade.profile.traces.record import Record
from crossfade.profile.traces.waits import Waits, waits_of
from tests.helpers.gpu_traces import Machine, Rank, causes


def waits(program: Callable[[Rank], None], folder: Path, *, has_record: bool) -> tuple[Waits, dict[str, Activity]]:
    """What is found, and the activities by name; the n-th collective is ``sum n``."""
    trace = read_trace(Machine(program, has_record=has_record).save(folder)[0])
    names, num = {}, 0
    for activity in trace.activities:
        is_sum = activity.name.startswith("nccl")
        names[f"sum {num}" if is_sum else activity.name] = activity
        num += is_sum
    return waits_of(trace, host_order(trace)), names


def waits_in_another_order(rank: Rank) -> None:
    for _ in range(3):
        rank.kernel(20, "before")
    first = rank.all_reduce(30, 1 << 20)
    second = rank.all_reduce(30, 1 << 20)
    rank.kernel(400, "long")
    second()
    rank.kernel(20, "needs the second")
    first()
    rank.kernel(20, "needs the first")


def test_a_wait_that_does_not_bind_belongs_to_its_event(tmp_path: Path) -> None:
    found, names = waits(waits_in_another_order, tmp_path, has_record=True)
    assert found.events[names["needs the second"]] == [names["sum 1"]]
    assert found.events[names["needs the first"]] == [names["sum 0"]]
    assert all(found.is_on_own_stream[names[f"sum {n}"]] for n in range(2))
    assert found.waited_at[names["sum 1"]].start_us < found.waited_at[names["sum 0"]].start_us
    guessed, names = waits(waits_in_another_order, tmp_path, has_record=False)
    assert guessed.events[names["needs the second"]] == [names["sum 0"]], "the oldest is guessed without a record"


def three_streams(rank: Rank) -> None:
    for _ in range(2):
        for stream, name in ((7, "a"), (8, "b"), (9, "c")):
            rank.stream = stream
            rank.kernel(10 * stream, name)
    for stream in (7, 8):  # the third one waits for both, then launches
        rank.stream = 9
        rank.wait_stream(stream)
    rank.kernel(10, "joined")


def test_several_waits_in_a_row(tmp_path: Path) -> None:
    found, names = waits(three_streams, tmp_path, has_record=True)
    assert set(found.events[names["joined"]]) == {names["a"], names["b"]}


def forks_and_joins(rank: Rank) -> None:
    """The default stream, which has work only once, waits for two others, and they begin again behind it."""
    rank.stream = 7
    rank.kernel(10, "first")
    for step in range(3):
        for stream in (8, 9):
            rank.stream = stream
            rank.wait_stream(7)
        for stream in (8, 9):
            rank.stream = stream
            rank.kernel(100 * stream, f"{stream} {step}")
        for stream in (8, 9):
            rank.stream = 7
            rank.wait_stream(stream)


def test_a_stream_that_only_waits_hands_on_what_it_waits_for(tmp_path: Path) -> None:
    found, names = waits(forks_and_joins, tmp_path, has_record=True)
    assert found.events[names["8 0"]] == [names["first"]]
    for step in range(1, 3):
        assert found.events[names[f"8 {step}"]] == [names["first"], names[f"9 {step - 1}"]]
        assert found.events[names[f"9 {step}"]] == [names["first"], names[f"8 {step - 1}"]]


def waits_and_hands_on(rank: Rank) -> None:
    """Stream 7 never has work: it waits for stream 8, and stream 9 for it. What is launched nearby is on stream 10."""
    rank.stream = 8
    rank.kernel(1000, "8")
    rank.stream = 7
    rank.wait_stream(8)
    rank.stream = 10
    rank.kernel(50, "10")
    rank.stream = 9
    rank.wait_stream(7)
    rank.kernel(10, "9")


def test_a_stream_without_work_is_no_other_one(tmp_path: Path) -> None:
    found, names = waits(waits_and_hands_on, tmp_path, has_record=True)
    assert found.events == {names["9"]: [names["8"]]}


def only_waits(rank: Rank) -> None:
    for step in range(3):
        for stream, length in ((8, 800), (9, 100)):
            rank.stream = stream
            rank.kernel(length, f"{stream} {step}")
        rank.stream = 7  # which has no work, and nobody waits for it
        rank.wait_stream(8)
        rank.wait_stream(9)


def test_what_only_a_stream_without_work_waits_for_holds_nothing(tmp_path: Path) -> None:
    found, _ = waits(only_waits, tmp_path, has_record=True)
    assert found.events == {}


def test_streams_by_cuda_sync_events(tmp_path: Path) -> None:
    """Without CUPTI's numbers: what a synchronisation event says of a stream counts more than what is launched nearby."""

    def program(rank: Rank) -> None:
        rank.kernel(50, "a")
        rank.stream = 8
        rank.wait_stream(7)
        rank.stream = 9
        rank.kernel(10, "c")  # what the thread launches next is on another stream than the one that waits
        rank.stream = 8
        rank.kernel(10, "b")

    path = Machine(program, has_record=True).save(tmp_path)[0]
    trace = json.loads(path.read_text())
    (wait,) = (event for event in trace["traceEvents"] if event["name"] == "cudaStreamWaitEvent")
    sync = {**wait, "cat": "cuda_sync", "name": "Stream Wait Event", "args": {**wait["args"], "stream": 8}}
    trace["traceEvents"].append(sync)
    del trace["crossfade"]["streams"]
    path.write_text(json.dumps(trace))
    read = read_trace(path)
    names = {activity.name: activity for activity in read.activities}
    assert waits_of(read, host_order(read)).events == {names["b"]: [names["a"]]}


@pytest.mark.parametrize(
    "contents", [{"version": 2}, {"version": 1, "calls": [[99, 1, 1, 1, 1]]}, {"version": 1, "calls": [1]}, [], "x"]
)
def test_a_record_that_cannot_be_read_is_a_note(tmp_path: Path, contents: Any) -> None:
    path = Machine(three_streams).save(tmp_path)[0]
    path.write_text(json.dumps({"crossfade": contents, **json.loads(path.read_text())}))
    trace = read_trace(path)
    assert trace.record is None
    assert "the record in it" in trace.notes[0]
    assert len(trace.activities) == 7


def test_queues_and_power() -> None:
    record = Record.read({"version": 1})
    assert (record.num_queues, record.load) == (8, None)
    samples = [[0, 1500, 695.0], [1, 1400, 698.0], [2, 1980, 300.0]]
    clocks = {"samples": samples, "max_mhz": 1980, "limit_w": 700.0}
    record = Record.read({"version": 1, "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "clocks": clocks})
    assert (record.num_queues, str(record.load)) == (1, "695 of 700 W, at 1,500 of 1,980 MHz")
    assert record.load is not None
    assert record.load.is_at_power_limit
    cool = {**clocks, "samples": [[0, 1980, 695.0]]}  # much power at the highest clock is no limit
    load = Record.read({"version": 1, "clocks": cool}).load
    assert load is not None
    assert not load.is_at_power_limit


def one_queue(rank: Rank) -> None:
    """A stream waits for a long kernel, and work of a third stream is launched behind it."""
    for _ in range(6):
        for _ in range(6):
            rank.stream = 7
            rank.kernel(300, "long", 40)
            rank.stream = 8
            rank.wait_stream(7)
            rank.kernel(20, "waits", 40)
            rank.stream = 9
            rank.kernel(250, "free", 40)
            rank.stream = 7
            rank.wait_stream(9)
        rank.kernel(30, "end", 40)


def test_hardware_queues_are_told_with_a_record_only(tmp_path: Path) -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    machine = Machine(one_queue, environment=environment, has_record=True)
    report = machine.report(tmp_path)
    assert causes(report)[0] == Cause.QUEUES
    gain = 1 - Machine(one_queue).length_us / machine.length_us
    assert gain > 0.2
    assert report.diagnoses[0].gain.likely == pytest.approx(gain, abs=0.1)
    plain = Machine(one_queue, environment=environment).report(tmp_path)
    assert Cause.QUEUES not in [one.finding.cause for one in plain.diagnoses]
    healthy = Machine(one_queue, has_record=True).report(tmp_path)
    assert Cause.QUEUES not in [one.finding.cause for one in healthy.diagnoses]


def test_what_is_said_of_the_machine(tmp_path: Path) -> None:
    path = Machine(one_queue, has_record=True).save(tmp_path)[0]
    trace = json.loads(path.read_text())
    trace["crossfade"]["clocks"] = {"samples": [[0, 1400, 699.0]], "max_mhz": 1980, "limit_w": 700.0}
    trace["crossfade"]["memory"] = {"num_allocated": 9, "num_retried": 3}
    trace["crossfade"]["environment"] = {"CUDA_LAUNCH_BLOCKING": "1"}
    path.write_text(json.dumps(trace))
    power, memory, blocking = diagnose(read_traces([path])).observed
    assert "at its power limit (699 of 700 W, at 1,400 of 1,980 MHz)" in power
    assert "freed its cache 3 times" in memory
    assert "CUDA_LAUNCH_BLOCKING" in blocking


@pytest.mark.parametrize("is_pageable", [True, False])
def test_only_copies_of_pageable_memory_hold_the_host(tmp_path: Path, is_pageable: bool) -> None:
    """On an idle stream a copy starts while its call still runs, whatever it copies."""

    def program(rank: Rank) -> None:
        for _ in range(3):
            rank.kernel(20)
            rank.copy(60, 1 << 20, is_pageable=is_pageable)

    path = Machine(program).save(tmp_path)[0]
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"]:
        if event["name"] == "cudaMemcpyAsync":
            event["dur"] = max(event["dur"], 90.0)
    path.write_text(json.dumps(trace))
    read = read_trace(path)
    returns = waits_of(read, host_order(read)).returns
    assert bool(returns) == is_pageable
