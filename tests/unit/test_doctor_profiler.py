"""What the profiler itself costs is no cause: it is taken away, by a measured step where a record has one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.doctor.report import report_json
from crossfade.profile.doctor.view import Cause
from crossfade.profile.traces.reader import read_traces
from tests.helpers.gpu_traces import Machine, Program, Rank, causes

_STEPS = 6


def small(launch_us: float, *, item_every: int = 0) -> Program:
    """Kernels of 9 us, each with an operator around; a launch takes 6 us, and so much more."""

    def launch(rank: Rank) -> None:
        rank.python(launch_us)
        rank.kernel(9, "small", 8)

    def program(rank: Rank) -> None:
        for _ in range(_STEPS):
            for number in range(80):
                rank.scope("aten::add", lambda: launch(rank))
                if item_every and number % item_every == 0:
                    rank.item()
            rank.kernel(30, "optimizer")

    return program


def examined(program: Program, folder: Path, profiler_us: float, *, is_measured: bool) -> tuple[Report, float]:
    """The report of a traced run, and how long a step takes that is not traced."""
    step_us = Machine(program, profiler_us=0.0).length_us / _STEPS
    machine = Machine(program, profiler_us=profiler_us, has_record=is_measured, untraced_us=step_us * is_measured)
    return machine.report(folder), step_us


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_host_that_the_profiler_makes_slow_is_no_cause(is_measured: bool, tmp_path: Path) -> None:
    report, step_us = examined(small(0.0), tmp_path, 4.4, is_measured=is_measured)
    assert report.step_us > 1.3 * step_us, "the traced program is launch-bound"
    assert causes(report) == []
    if is_measured:
        assert report.untraced.step_us == pytest.approx(step_us, rel=0.03)
        assert report.diagnoses == ()


def test_what_a_plain_trace_leaves_open_is_at_most_a_remark(tmp_path: Path) -> None:
    report, _ = examined(small(0.0), tmp_path, 5.5, is_measured=False)
    (remark,) = report.diagnoses
    assert remark.is_remark
    assert remark.gain.most > 0.05 > remark.gain.likely
    assert any("untraced_steps" in text for text in report.unknown)


@pytest.mark.parametrize("profiler_us", [0.5, 2.5, 9.0])
def test_a_measured_step_tells_what_the_profiler_needs(profiler_us: float, tmp_path: Path) -> None:
    """Python between calls is not made cheaper by that."""
    report, step_us = examined(small(14.0), tmp_path, profiler_us, is_measured=True)
    assert report.untraced.event_us == pytest.approx(profiler_us, abs=0.4)
    assert report.untraced.step_us == pytest.approx(step_us, rel=0.02)
    assert causes(report) == [Cause.LAUNCH]
    gpu_us = 80 * (9 + 1.6) + 30 + 1.6
    assert report.diagnoses[0].gain.likely == pytest.approx(1 - gpu_us / step_us, abs=0.03)
    assert report_json(report)["is_untraced_measured"]
    assert "a step without the profiler takes" in report.observed[0]


def test_a_step_that_no_profiler_explains_is_said(tmp_path: Path) -> None:
    report = Machine(small(14.0), has_record=True, untraced_us=200.0).report(tmp_path)
    assert any("gains may be off by as much" in text for text in report.unknown)
    assert 0.0 < report.untraced.step_us < report.step_us


def test_waits_come_before_launches_that_win_a_little_more(tmp_path: Path) -> None:
    report, _ = examined(small(9.0, item_every=4), tmp_path, 2.5, is_measured=False)
    assert causes(report) == [Cause.HOST_WAIT, Cause.LAUNCH]
    waits, launches = report.diagnoses
    assert waits.gain.likely < launches.gain.likely, "else the order says nothing"
    assert "on top of" in launches.confidence


def test_launches_come_first_where_they_win_far_more(tmp_path: Path) -> None:
    report, _ = examined(small(60.0, item_every=10), tmp_path, 2.5, is_measured=False)
    assert causes(report)[0] == Cause.LAUNCH


def test_the_rank_that_began_last_tells_how_long_an_untraced_step_is(tmp_path: Path) -> None:
    """One that begins earlier waits for the others in its first collective."""

    def program(rank: Rank) -> None:
        for _ in range(_STEPS):
            for _ in range(4):
                rank.kernel(300)
            rank.all_reduce(60, 1 << 20)()

    paths = Machine(program, 2, has_record=True, untraced_us=1300.0).save(tmp_path)
    early = json.loads(paths[0].read_text())
    early["crossfade"]["untraced_us"] = 9000.0
    paths[0].write_text(json.dumps(early))
    assert diagnose(read_traces(paths)).untraced.measured_us == 1300.0
