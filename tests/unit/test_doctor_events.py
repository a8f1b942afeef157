"""Collectives that wait for more than what makes their input: told by tensors of a record, or by where gradients are summed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.doctor.view import Cause
from crossfade.profile.traces.reader import read_trace
from crossfade.profile.traces.tensors import dataflow
from tests.helpers.gpu_traces import Machine, Program, Rank, causes, gain

_STEPS, _LAYERS = 6, 6
_INPUT, _OTHER = 1, 2  # storages
_CONTENTION = 0.08  # of the step: the simulated machine knows none, and the doctor counts with some


def kernels(rank: Rank, num: int, length_us: float, name: str, written: int) -> None:
    for _ in range(num):
        rank.operator("aten::mm", partial(rank.kernel, length_us, name), writes=[written])


def layers(sum_us: float, order: tuple[str, ...]) -> Program:
    """In each layer, in this order: what makes the input of a sum, other computation, the sum; then more, and the wait for it."""

    def program(rank: Rank) -> None:
        for _ in range(_STEPS):
            for _ in range(_LAYERS):
                wait = None
                for what in order:
                    if what == "input":
                        kernels(rank, 1, 100, "input", _INPUT)
                        rank.operator("aten::view", lambda: None, [_INPUT], [_INPUT])
                    elif what == "other":
                        kernels(rank, 3, 200, "other", _OTHER)
                    else:
                        reduce = partial(rank.all_reduce, sum_us, 1 << 22)
                        wait = rank.operator("c10d::allreduce_", reduce, [_INPUT], [_INPUT])
                kernels(rank, 1, 150, "more", _OTHER)
                assert wait is not None
                wait()
            rank.kernel(60, "optimizer")

    return program


LATE, RIGHT, NEEDED = ("input", "other", "sum"), ("input", "sum", "other"), ("other", "input", "sum")


def examined(program: Program, folder: Path, *, has_record: bool = True) -> Report:
    return Machine(program, 2, has_record=has_record).report(folder)


def test_a_late_event_is_told_by_its_tensors(tmp_path: Path) -> None:
    report = examined(layers(500, LATE), tmp_path)
    assert causes(report)[0] == Cause.LATE_EVENT
    won = gain(layers(500, LATE), layers(500, RIGHT), 2)
    assert won > 0.2
    assert report.diagnoses[0].gain.likely == pytest.approx(won, abs=_CONTENTION)
    assert "input" in report.diagnoses[0].finding.evidence


@pytest.mark.parametrize("order", [RIGHT, NEEDED], ids=["right", "needed"])
def test_an_event_behind_what_makes_the_input_is_not_late(order: tuple[str, ...], tmp_path: Path) -> None:
    report = examined(layers(500, order), tmp_path)
    assert Cause.LATE_EVENT not in [one.finding.cause for one in report.diagnoses]


def test_a_late_event_of_a_short_sum_costs_nothing(tmp_path: Path) -> None:
    assert gain(layers(120, LATE), layers(120, RIGHT), 2) < 0.02
    assert Cause.LATE_EVENT not in causes(examined(layers(120, LATE), tmp_path))


def test_a_plain_trace_does_not_tell(tmp_path: Path) -> None:
    report = examined(layers(500, LATE), tmp_path, has_record=False)
    assert Cause.LATE_EVENT not in [one.finding.cause for one in report.diagnoses]


def test_what_makes_an_input(tmp_path: Path) -> None:
    """A view launches nothing, and a sum is what makes the input of one behind it."""

    def program(rank: Rank) -> None:
        reduce = partial(rank.all_reduce, 50, 1 << 20)
        kernels(rank, 1, 10, "a", _INPUT)
        rank.operator("aten::view", lambda: None, [_INPUT], [_INPUT])
        kernels(rank, 1, 10, "b", _OTHER)
        for _ in range(2):
            rank.operator("c10d::allreduce_", lambda: rank.operator("inner", reduce, [_INPUT]), [_INPUT], [_INPUT])
        rank.operator("aten::view", lambda: None, [_INPUT], [_INPUT])
        rank.operator("aten::mm", partial(rank.kernel, 10, "c"), [_INPUT], [_OTHER])
        rank.operator("c10d::allreduce_", reduce, [99], [99])  # what the trace does not have

    trace = read_trace(Machine(program, has_record=True).save(tmp_path)[0])
    diagnose([trace])  # joins calls and activities
    sums = [activity for activity in trace.activities if activity.message.collective]
    (a,) = (activity for activity in trace.activities if activity.name == "a")
    (c,) = (activity for activity in trace.activities if activity.name == "c")
    flow = dataflow(trace)
    assert flow.made_by == {sums[0]: a, sums[1]: sums[0]}
    assert flow.needed_by == {sums[0]: sums[1], sums[1]: c}


def blocking(is_needed_at_once: bool) -> Program:
    """A sum on the stream that computes, whose result is needed by the next product, or by the last one of the step only."""

    def program(rank: Rank) -> None:
        for _ in range(_STEPS):
            for layer in range(_LAYERS):
                kernels(rank, 1, 200, "product", 10 + layer)
                reduce = partial(rank.all_reduce, 150, 1 << 22, is_async=False)
                rank.operator("c10d::allreduce_", reduce, [10 + layer], [10 + layer])
                reads = [10 + layer] if is_needed_at_once else [_OTHER]
                for _ in range(2):
                    rank.operator("aten::mm", partial(rank.kernel, 200, "next"), reads, [_OTHER])
            rank.operator("aten::cat", partial(rank.kernel, 60, "last"), [10 + layer for layer in range(_LAYERS)])

    return program


def test_a_result_that_is_needed_later_is_told_by_its_tensors(tmp_path: Path) -> None:
    (later, at_once, plain) = (
        examined(blocking(is_needed), tmp_path, has_record=has_record)
        for is_needed, has_record in ((False, True), (True, True), (False, False))
    )
    (diagnosis,) = later.diagnoses
    assert (diagnosis.finding.cause, diagnosis.is_remark) == (Cause.BLOCKING, False)
    assert diagnosis.gain.least == diagnosis.gain.most > 0.1
    assert "first needed by last" in diagnosis.finding.evidence
    assert at_once.diagnoses == ()
    assert [one.is_remark for one in plain.diagnoses] == [True]


def training(sum_us: float, where: str, *, is_async: bool = True, num: int = 1 << 22) -> Program:
    """Gradients are summed behind the backward pass, in it, or (of something else) in the forward pass."""

    def program(rank: Rank) -> None:
        for _ in range(_STEPS):
            waits: list[Callable[[], None]] = []

            def reduce(waits: list[Callable[[], None]] = waits) -> None:
                waits.append(rank.all_reduce(sum_us, num, is_async=is_async))

            for _ in range(_LAYERS):
                rank.kernel(150, "forward")
            rank.thread = 2
            for _ in range(_LAYERS):
                rank.scope("autograd::engine::evaluate_function: MmBackward0", partial(rank.kernel, 300, "backward"))
                if where == "hook":
                    rank.scope("autograd::engine::evaluate_function: A", reduce)
            rank.thread = 1
            if where == "behind":
                for _ in range(_LAYERS):
                    reduce()
            while waits:
                waits.pop(0)()
            rank.scope("Optimizer.step#SGD.step", partial(rank.kernel, 60, "optimizer"))

    return program


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "blocking"])
def test_gradients_that_are_summed_behind_the_backward_pass(is_async: bool, tmp_path: Path) -> None:
    late = training(200, "behind", is_async=is_async)
    report = examined(late, tmp_path, has_record=False)
    assert causes(report) == [Cause.LATE_EVENT]
    won = gain(late, training(200, "hook"), 2)
    assert won > 0.2
    assert report.diagnoses[0].gain.likely == pytest.approx(won, abs=_CONTENTION)


@pytest.mark.parametrize(
    "program",
    [training(200, "hook"), training(10, "behind"), training(20, "behind", num=1)],
    ids=["in the backward pass", "short", "a norm"],
)
def test_sums_that_cost_nothing_or_are_no_gradients(program: Program, tmp_path: Path) -> None:
    report = examined(program, tmp_path, has_record=False)
    assert Cause.LATE_EVENT not in causes(report)
