"""Traces recorded on one and two H100 or H200 (torch 2.11, CUDA 13.0): the first diagnosis, and its gain beside the measured one.

Each program ran with its cause and without it, in turns and without a profiler; the traces were recorded afterwards and made small
by ``benchmarks.doctor.slim``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.traces.reader import read_traces
from tests.helpers.gpu_traces import causes

TRACES = Path(__file__).parents[1] / "data" / "traces"
ONE, TWO = 1, 2  # ranks
MEASURED = [  # trace, its ranks, cause, gain, by how much the prediction may be off
    ("pageable_each_layer", ONE, "pageable_copy", 0.41, 0.08),
    ("free_each_layer", ONE, "allocator", 0.155, 0.06),
    ("small_kernels", ONE, "launch_bound", 0.874, 0.08),
    ("item_and_pageable", ONE, "pageable_copy", 0.412, 0.08),
    ("nonzero_each_layer", ONE, "implicit_synchronisation", 0.199, 0.08),  # the fix left out kernels too
    ("two_streams", ONE, "implicit_synchronisation", 0.282, 0.08),
    ("waiting_stream", ONE, "default_stream", 0.268, 0.04),
    ("small_before_large", TWO, "communicator_order", 0.237, 0.04),
    ("slow_rank", TWO, "late_peer", 0.315, 0.04),
    ("unused_parameters", TWO, "find_unused_parameters", 0.104, 0.04),
    ("contended", TWO, "contention", 0.132, 0.06),  # without the cause its sums are not there at all
    ("late_sums", TWO, "late_event", 0.135, 0.04),
    ("two_backwards", TWO, "two_backwards", 0.141, 0.06),
    ("batches_in_sequence", TWO, "launch_order", 0.118, 0.06),  # recorded by crossfade.record
    ("ddp_two_streams", TWO, "launch_order", 0.031, 0.03),  # the same; what crossfade.interleaved won of it
]


def report_of(name: str, num_ranks: int) -> Report:
    ranks = [f"-rank{rank}" for rank in range(num_ranks)] if num_ranks > 1 else [""]
    return diagnose(read_traces([TRACES / f"{name}{rank}.json.gz" for rank in ranks]))


@pytest.mark.parametrize(
    ("name", "num_ranks", "cause", "gain", "tolerance"), MEASURED, ids=[row[0] for row in MEASURED]
)
def test_the_first_diagnosis_is_the_cause(name: str, num_ranks: int, cause: str, gain: float, tolerance: float) -> None:
    report = report_of(name, num_ranks)
    assert num_ranks > 1 or report.error < 0.01
    assert causes(report)[0] == cause
    assert report.diagnoses[0].gain.likely == pytest.approx(gain, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("healthy_convnet", ONE), ("healthy_transformer", ONE), ("tensor_parallel", TWO)],
    ids=["convnet", "transformer", "results that are needed at once"],
)
def test_a_healthy_program_gets_no_diagnosis(name: str, num_ranks: int) -> None:
    report = report_of(name, num_ranks)
    assert causes(report) == []
    assert report.traced.program.num_steps >= 4
