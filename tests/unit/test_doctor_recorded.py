"""Traces recorded on one and two H100 or H200 (torch 2.11, CUDA 13.0): the first diagnosis, and its gain beside the measured one.

Each program ran with its cause and without it, in turns and without a profiler; the traces were recorded afterwards and made small
by ``benchmarks.doctor.slim``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.traces.reader import read_traces

TRACES = Path(__file__).parents[1] / "data" / "traces"
MEASURED = [  # trace, cause, gain, by how much the prediction may be off
    ("pageable_each_layer", "pageable_copy", 0.41, 0.08),
    ("free_each_layer", "allocator", 0.155, 0.06),
    ("small_kernels", "launch_bound", 0.874, 0.08),
    ("item_and_pageable", "pageable_copy", 0.412, 0.08),
    (
        "nonzero_each_layer",
        "implicit_synchronisation",
        0.199,
        0.08,
    ),  # a part of it is kernels, which the fix left out too
    ("two_streams", "implicit_synchronisation", 0.282, 0.08),
    ("waiting_stream", "default_stream", 0.268, 0.04),
]

BETWEEN_TWO = [
    ("small_before_large", "communicator_order", 0.237, 0.04),
    ("slow_rank", "late_peer", 0.315, 0.04),
    ("unused_parameters", "find_unused_parameters", 0.104, 0.04),
    ("contended", "contention", 0.132, 0.06),  # without the cause its sums are not there at all
    ("late_sums", "late_event", 0.135, 0.04),
    ("two_backwards", "two_backwards", 0.141, 0.06),
    ("batches_in_sequence", "launch_order", 0.118, 0.06),  # recorded by crossfade.record
    ("ddp_two_streams", "launch_order", 0.031, 0.03),  # the same; what crossfade.interleaved won of it
]


@pytest.mark.parametrize(("name", "cause", "gain", "tolerance"), MEASURED, ids=[row[0] for row in MEASURED])
def test_the_first_diagnosis_is_the_cause(name: str, cause: str, gain: float, tolerance: float) -> None:
    report = diagnose(read_traces([TRACES / f"{name}.json.gz"]))
    assert report.error < 0.01
    found = [diagnosis for diagnosis in report.diagnoses if not diagnosis.is_remark]
    assert found[0].finding.cause == cause
    assert found[0].gain.likely == pytest.approx(gain, abs=tolerance)


@pytest.mark.parametrize("name", ["healthy_convnet", "healthy_transformer"])
def test_a_healthy_program_gets_no_diagnosis(name: str) -> None:
    report = diagnose(read_traces([TRACES / f"{name}.json.gz"]))
    assert [diagnosis.finding.cause for diagnosis in report.diagnoses if not diagnosis.is_remark] == []
    assert report.traced.program.num_steps >= 4


def of_two(name: str) -> Report:
    return diagnose(read_traces([TRACES / f"{name}-rank{rank}.json.gz" for rank in range(2)]))


@pytest.mark.parametrize(("name", "cause", "gain", "tolerance"), BETWEEN_TWO, ids=[row[0] for row in BETWEEN_TWO])
def test_the_first_diagnosis_of_two_ranks(name: str, cause: str, gain: float, tolerance: float) -> None:
    report = of_two(name)
    found = [diagnosis for diagnosis in report.diagnoses if not diagnosis.is_remark]
    assert found[0].finding.cause == cause
    assert found[0].gain.likely == pytest.approx(gain, abs=tolerance)


def test_results_that_are_needed_at_once_are_no_diagnosis() -> None:
    report = of_two("tensor_parallel")
    assert [diagnosis.finding.cause for diagnosis in report.diagnoses if not diagnosis.is_remark] == []
