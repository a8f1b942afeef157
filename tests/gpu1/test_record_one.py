"""One GPU: what `crossfade.record` writes is a plain trace, all of its entries find their calls, and edges are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import crossfade
from crossfade.profile.doctor.diagnosis import diagnose
from crossfade.profile.traces.events import RankTrace
from crossfade.profile.traces.exact import ExactEvents, match
from crossfade.profile.traces.launches import host_order
from crossfade.profile.traces.reader import read_trace
from crossfade.profile.traces.roles import Role


def recorded(folder: Path, num: int = 5) -> RankTrace:
    """Two streams that wait for each other, and a value that the host reads."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]
    x = torch.randn(2048, 2048, device="cuda")
    y = x

    def step() -> None:
        nonlocal y
        main = torch.cuda.current_stream()
        for _ in range(4):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y = (x @ x).tanh()
            main.wait_stream(side)
            y = y @ x
        float(y[0, 0])

    step()
    with crossfade.record(folder) as recording:
        for _ in range(num):
            step()
            recording.step()
    assert recording.path is not None
    return read_trace(recording.path)


def test_every_entry_has_its_call(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    assert trace.record is not None
    roles = [entry.role for entry in trace.record.entries]
    assert roles.count(Role.WAIT_EVENT) >= 2 * 4 * 5
    assert len(match(trace)) == len(roles)


def test_edges_and_streams_are_known(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    assert trace.record is not None
    order = host_order(trace)
    exact = ExactEvents(trace, order)
    assert len(exact.edges) >= 2 * 4 * 5
    known = [edge for edge in exact.edges.values() if edge.sources and edge.target is not None]
    assert len(known) >= len(exact.edges) - 2, "the first waits for what was launched before, the last holds nothing"
    for target, sources in known:
        assert target is not None
        assert any(source.lane != target.lane for source in sources)
        assert all(source.end_us <= target.start_us + 5.0 for source in sources)
    numbers = {number for _, number in order.lanes}
    assert numbers <= {number for _, number in trace.record.streams} or set(trace.sync_streams.values()) & numbers


def test_the_doctor_replays_it(tmp_path: Path) -> None:
    trace = recorded(tmp_path)
    report = diagnose([trace])
    assert report.traced.program.num_steps >= 5
    assert report.error < 0.03


def test_recording_ends(tmp_path: Path) -> None:
    """A second recording has nothing of the first one, and none is written to after its end."""
    first, second = recorded(tmp_path / "a", 2), recorded(tmp_path / "b", 2)
    assert first.record is not None
    assert second.record is not None
    assert len(first.record.entries) == len(second.record.entries)


def test_steps_before_the_trace_and_tensors(tmp_path: Path) -> None:
    x = torch.randn(2048, 2048, device="cuda")

    def step() -> None:
        for _ in range(8):
            (x @ x).tanh_()

    step()
    with crossfade.record(tmp_path, untraced_steps=4, with_tensors=True) as recording:
        for _ in range(9):
            step()
            recording.step()
    assert recording.path is not None
    trace = read_trace(recording.path)
    assert trace.record is not None
    report = diagnose([trace])
    assert 0.0 < trace.record.untraced_us < 1.2 * report.step_us
    assert report.untraced.measured_us == trace.record.untraced_us
    known = [use for use in trace.record.tensors if use.operator in trace.numbered]
    assert len(known) >= 5 * 8 * 2, "each product and each tanh has its operator in the trace"
