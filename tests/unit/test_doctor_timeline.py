"""The doctor's timelines are `crossfade.Timeline`s, with the doctor's own figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import crossfade
from crossfade.plan.timeline import Timeline
from crossfade.profile.doctor.build import Traced
from crossfade.profile.doctor.metrics import rank_metrics
from crossfade.profile.doctor.timeline import one_step, replayed, spans_of
from tests.helpers.gpu_traces import Machine, Rank


def program(rank: Rank) -> None:
    for _ in range(4):
        for _ in range(3):
            rank.kernel(200)
            rank.all_reduce(100, 1 << 20)()
        rank.item()


def seen(traced: Traced) -> Timeline:
    """The steps as they were traced."""
    return Timeline.of("traced", spans_of(traced, traced.seen))


def test_figures_of_a_timeline(tmp_path: Path) -> None:
    report = Machine(program, 2).report(tmp_path)
    timeline = seen(report.traced)
    assert isinstance(timeline, crossfade.Timeline)
    assert timeline.actors == ("rank 0", "rank 1")
    for row in rank_metrics(report.traced):
        assert timeline.compute_us(row.label) == pytest.approx(row.compute_us)
        assert timeline.communicate_us(row.label) == pytest.approx(row.communicate_us + row.copy_us, rel=0.01)
        assert timeline.wait_us(row.label) > 0
    assert {span.execution for span in timeline.spans} == set(range(report.traced.program.num_steps))


def test_the_replay_without_change_is_the_trace(tmp_path: Path) -> None:
    report = Machine(program, 2).report(tmp_path)
    again = replayed(report.traced, report.traced.program, "again")
    assert again is not None
    assert again.makespan_us == pytest.approx(seen(report.traced).makespan_us, rel=0.01)


def test_one_step_is_as_long_as_the_doctor_says(tmp_path: Path) -> None:
    report = Machine(program, 2).report(tmp_path)
    now, *_ = one_step(report)
    assert now.makespan_us == pytest.approx(report.step_us, rel=0.05)
    assert now.spans[0].start_us >= 0.0


def test_steps_without_work_of_the_gpu_are_passed_over(tmp_path: Path) -> None:
    def late_work(rank: Rank) -> None:
        for step in range(6):
            rank.scope(f"ProfilerStep#{step}", partial(rank.kernel, 200.0) if step > 2 else rank.free)

    report = Machine(late_work).report(tmp_path)
    now, *_ = one_step(report)
    assert [span.execution for span in now.spans if span.stream != "host"] == [4]
