"""Traces recorded on one H100 (torch 2.11, CUDA 13.0): the first diagnosis, and its gain beside the one that was measured.

Each program ran with its cause and without it, in turns and without a profiler; the traces were recorded afterwards and made small
by ``benchmarks.doctor.slim``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfade.profile.doctor.diagnosis import diagnose
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
