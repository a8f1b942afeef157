"""Batches that are launched one after the other, and collectives that keep their communicator's order on any stream."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from crossfade.profile.doctor.view import Cause
from tests.helpers.doctor_programs import batches_of_a_training_step, steps
from tests.helpers.gpu_traces import Machine, Rank, causes, gain

WITH, WITHOUT = (partial(batches_of_a_training_step, has_cause=has) for has in (True, False))


def test_batches_that_a_step_joins_are_told_although_ranks_launch_different_numbers_of_calls(tmp_path: Path) -> None:
    first = Machine(WITH, 2, has_record=True).report(tmp_path).diagnoses[0]
    assert first.finding.cause == Cause.LAUNCH_ORDER
    assert 0.2 < first.gain.likely < gain(WITH, WITHOUT, 2)  # this machine knows no contention


def test_batches_that_are_launched_in_turns_are_no_diagnosis(tmp_path: Path) -> None:
    report = Machine(WITHOUT, 2, has_record=True).report(tmp_path)
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

    report = Machine(steps(layer), 2, has_record=has_record).report(tmp_path)
    assert report.error < 0.01
    assert {Cause.BLOCKING, Cause.LATE_EVENT}.isdisjoint(causes(report))
