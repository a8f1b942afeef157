"""Causes planted in simulated programs: the first diagnosis names the cause, and its gain is what the machine wins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from crossfade.errors import TraceError
from crossfade.profile.doctor.diagnosis import diagnose
from crossfade.profile.doctor.view import Cause, View
from crossfade.profile.traces.reader import read_traces
from tests.helpers.doctor_programs import PLANTED, STEPS, Program, blocking_stream, products, steps, two_backwards
from tests.helpers.gpu_traces import Machine, Rank, causes, gain

each_planted = pytest.mark.parametrize(
    ("cause", "program", "num_ranks", "tolerance"), PLANTED, ids=[row[1].__name__ for row in PLANTED]
)


@each_planted
def test_the_cause_comes_first_with_its_gain(
    cause: str, program: Program, num_ranks: int, tolerance: float, tmp_path: Path
) -> None:
    report = Machine(lambda rank: program(rank, True), num_ranks).report(tmp_path)
    assert report.error < 0.01, "the replay without change is not the trace"
    assert report.traced.program.num_steps >= STEPS - 2
    won = gain(lambda rank: program(rank, True), lambda rank: program(rank, False), num_ranks)
    assert won > 0.05, "the machine wins nothing: the test is wrong"
    assert not report.abstains
    found = [(diagnosis.finding.cause, diagnosis.gain) for diagnosis in report.diagnoses]
    assert causes(report)[:1] == [cause], f"the machine wins {won:.1%}; found, remarks included: {found}"
    assert report.diagnoses[0].gain.likely == pytest.approx(won, abs=tolerance)


@each_planted
def test_a_healthy_program_gets_no_diagnosis(
    cause: str, program: Program, num_ranks: int, tolerance: float, tmp_path: Path
) -> None:
    report = Machine(lambda rank: program(rank, False), num_ranks).report(tmp_path)
    assert cause not in causes(report), report.diagnoses


def of_two_runs(folder: Path, nums: Sequence[int], other_nums: Sequence[int]) -> list[Path]:
    """Rank 0 of a run and rank 1 of another one, each with its sizes of all-reduces."""
    paths = []
    for rank, own in enumerate((nums, other_nums)):

        def layer(at: Rank, _: int, own: Sequence[int] = own) -> None:
            for num in own:
                products(at, 3)
                at.all_reduce(100, num)()

        (folder / str(rank)).mkdir()
        paths.append(Machine(steps(layer), 2).save(folder / str(rank))[rank])
    return paths


def test_ranks_of_two_runs_are_refused(tmp_path: Path) -> None:
    paths = of_two_runs(tmp_path, [1 << 20], [1 << 21])
    with pytest.raises(TraceError, match=r"no collective in common\nhint: "):
        diagnose(read_traces(paths))


def test_collectives_that_are_not_matched_are_told(tmp_path: Path) -> None:
    report = diagnose(read_traces(of_two_runs(tmp_path, [1 << 20, 1 << 21], [1 << 21, 1 << 20])))
    assert any("their collectives differ from the first one on" in text for text in report.unknown)


@pytest.mark.parametrize("num_given", [1, 2, 3])
def test_ranks_that_are_missing_are_told(tmp_path: Path, num_given: int) -> None:
    def layer(rank: Rank, _: int) -> None:
        products(rank, 3)
        rank.all_reduce(100, 1 << 20)()
        rank.item()

    report = diagnose(read_traces(Machine(steps(layer), 3).save(tmp_path)[:num_given]))
    assert any("give the files of all ranks" in text for text in report.unknown) == (num_given < 3)
    assert report.diagnoses
    assert all(("not the traces of all ranks" in one.confidence) == (num_given < 3) for one in report.diagnoses)


def test_sums_that_are_hidden_cost_nothing(tmp_path: Path) -> None:
    """The same sums in both backward passes, each behind the computation after it."""
    assert causes(Machine(lambda rank: two_backwards(rank, True, 25), 2).report(tmp_path)) == []


def test_short_waits_for_the_default_stream_cost_nothing(tmp_path: Path) -> None:
    (found,) = Machine(lambda rank: blocking_stream(rank, True, 8)).report(tmp_path).diagnoses
    assert found.finding.cause == Cause.DEFAULT_STREAM
    assert found.is_remark


def test_streams_that_events_order_do_not_wait_for_the_default_stream(tmp_path: Path) -> None:
    """Copies and products in turns, each of which waits for the other stream's event: the two never run at once either."""

    def layer(rank: Rank, _: int) -> None:
        rank.stream = 15
        rank.wait_stream(7)
        rank.copy(150, 1 << 22, is_pageable=False)
        rank.stream = 7
        rank.wait_stream(15)
        products(rank, 3, 120)

    report = Machine(steps(layer)).report(tmp_path)
    assert Cause.DEFAULT_STREAM not in [one.finding.cause for one in report.diagnoses]


def test_a_hiccup_in_one_step_hides_no_gain(tmp_path: Path) -> None:
    """The host of one step does something else for as long as fifty steps take."""
    num_steps = iter(range(10**6))

    def end(rank: Rank) -> None:
        if next(num_steps) % STEPS == 2:
            rank.python(120_000)

    def layer(rank: Rank, _: int) -> None:
        products(rank, 6, 45)
        rank.python(120)
        rank.item()

    assert causes(Machine(steps(layer, end)).report(tmp_path))[0] == Cause.HOST_WAIT


def test_what_is_won_in_half_of_the_steps_is_a_remark(tmp_path: Path) -> None:
    def step(rank: Rank, number: int) -> None:
        products(rank, 20)
        for _ in range(20 * (number >= 3)):
            rank.python(400)
            rank.item()

    def program(rank: Rank) -> None:
        for number in range(STEPS):
            rank.scope(f"ProfilerStep#{number}", partial(step, rank, number))

    report = Machine(program).report(tmp_path)
    assert report.traced.program.num_steps == STEPS
    assert Cause.HOST_WAIT in [one.finding.cause for one in report.diagnoses]
    assert causes(report) == []


@pytest.mark.parametrize("marks_last", [False, True])
def test_what_is_around_several_steps_is_no_place_in_one(marks_last: bool, tmp_path: Path) -> None:
    def step(rank: Rank) -> None:
        for _ in range(20):
            rank.kernel(30)
            rank.python(400)
            rank.item()

    def program(rank: Rank) -> None:
        def epoch() -> None:
            for number in range(STEPS):
                rank.scope(f"ProfilerStep#{number}", partial(step, rank) if marks_last else partial(rank.python, 0.5))
                if not marks_last:
                    step(rank)

        rank.scope("epoch", epoch)

    view = View(Machine(program).report(tmp_path).traced)
    said = view.sites(range(len(view.traced.calls)))
    assert "aten::item (" in said
    assert "epoch" not in said
