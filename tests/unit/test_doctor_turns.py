"""Batches that are launched one after the other, and collectives that keep their communicator's order on any stream."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.doctor.view import Cause
from crossfade.profile.traces.reader import read_traces
from tests.helpers.doctor_programs import Program, batches_of_a_training_step, steps
from tests.helpers.gpu_traces import Machine, Rank


def examined(program: Program, folder: Path, *, has_cause: bool = True) -> Report:
    machine = Machine(lambda rank: program(rank, has_cause), 2, has_record=True)
    return diagnose(read_traces(machine.save(folder)))


def test_batches_that_a_step_joins_are_told_although_ranks_launch_different_numbers_of_calls(tmp_path: Path) -> None:
    report = examined(batches_of_a_training_step, tmp_path)
    length_us, fixed_us = (
        Machine(partial(batches_of_a_training_step, has_cause=has), 2, profiler_us=0.0).length_us
        for has in (True, False)
    )
    first = report.diagnoses[0]
    assert first.finding.cause == Cause.LAUNCH_ORDER
    assert 0.2 < first.gain.likely < 1 - fixed_us / length_us  # this machine knows no contention


def test_batches_that_are_launched_in_turns_are_no_diagnosis(tmp_path: Path) -> None:
    report = examined(batches_of_a_training_step, tmp_path, has_cause=False)
    assert Cause.LAUNCH_ORDER not in [one.finding.cause for one in report.diagnoses]


@pytest.mark.parametrize("has_record", [False, True])
def test_a_collective_that_waits_for_its_communicator_alone_is_not_blocking_nor_late(
    tmp_path: Path, has_record: bool
) -> None:
    """The first sum beside its caller's stream would end no sooner, and the second one's event lies right behind its input."""

    def layer(rank: Rank, number: int) -> None:
        rank.operator("aten::mm", partial(rank.kernel, 100, "other"), writes=[2])
        rank.stream = 9
        rank.wait_stream(7)
        rank.stream = 7
        rank.operator("aten::mm", partial(rank.kernel, 300, "input"), writes=[1])
        first = partial(rank.all_reduce, 250, 1 << 22, is_async=False)
        rank.operator("c10d::allreduce_", first, [1], [1])
        rank.stream = 9
        wait = rank.operator("c10d::allreduce_", partial(rank.all_reduce, 250, 1 << 22), [2], [2])
        rank.stream = 7
        wait()
        rank.operator("aten::mm", partial(rank.kernel, 200, "needs both"), [1, 2], [3])

    report = diagnose(read_traces(Machine(steps(layer), 2, has_record=has_record).save(tmp_path)))
    assert report.error < 0.01
    found = [one.finding.cause for one in report.diagnoses if not one.is_remark]
    assert Cause.BLOCKING not in found
    assert Cause.LATE_EVENT not in found
