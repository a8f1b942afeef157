"""Random programs on the simulated machine: their traces are replayed as they were, and no cause breaks the doctor."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.errors import TraceError
from crossfade.profile.doctor.diagnosis import diagnose
from crossfade.profile.doctor.metrics import collective_metrics, rank_metrics
from crossfade.profile.doctor.page import page
from crossfade.profile.doctor.report import report_json, report_page
from crossfade.profile.traces.reader import read_traces
from tests.helpers.gpu_traces import Machine, Rank

KINDS = [
    "kernel",
    "small",
    "python",
    "item",
    "pageable",
    "pinned",
    "free",
    "sum",
    "sum and wait",
    "blocking sum",
    "other",
]
Step = list[tuple[str, int]]


def run(rank: Rank, step: Step, num_steps: int) -> None:
    for _ in range(num_steps):
        waits: list[Callable[[], None]] = []
        for kind, length_us in step:
            late = length_us * (2 if rank.number else 1)
            if kind == "kernel":
                rank.kernel(late, f"gemm {length_us}")
            elif kind == "small":
                rank.kernel(length_us / 20, "small", 4)
            elif kind == "python":
                rank.python(length_us)
            elif kind == "item":
                rank.item()
            elif kind in ("pageable", "pinned"):
                rank.copy(length_us, length_us * 20_000, is_pageable=kind == "pageable")
            elif kind == "free":
                rank.free()
            elif kind == "other":
                rank.stream = 20 - rank.stream if rank.stream in (7, 13) else 7
                rank.wait_stream(7 if rank.stream == 13 else 13)
            else:
                wait = rank.all_reduce(length_us, length_us * 1000, is_async=kind != "blocking sum")
                waits.append(wait)
                if kind == "sum and wait":
                    waits.pop()()
        for wait in waits:
            wait()
        rank.stream = 7
        rank.kernel(30, "optimizer")


@settings(max_examples=60, deadline=None)
@given(
    step=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(5, 600)), min_size=1, max_size=12),
    num_ranks=st.integers(1, 3),
    num_steps=st.integers(1, 5),
)
def test_random_programs(step: Step, num_ranks: int, num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = Machine(lambda rank: run(rank, step, num_steps), num_ranks).save(Path(folder))
        report = diagnose(read_traces(paths))
    step_us = max(row.total_us for row in rank_metrics(report.traced)) / num_steps
    assert report.error * step_us < max(
        0.03 * step_us, 5.0
    )  # shortest steps take 100 us: the doctor abstains then, and may
    assert all(0.0 <= diagnosis.gain.likely <= diagnosis.gain.most < 1.0 for diagnosis in report.diagnoses)
    for row in rank_metrics(report.traced):
        parts = row.compute_us + row.exposed_us + row.copy_us + row.idle_us
        assert abs(parts - row.total_us) < 1.0
    assert sum(row.exposed_us for row in collective_metrics(report.traced)) >= 0.0
    json.dumps(report_json(report), allow_nan=False)
    assert "</html>" in page(report_page(report))


def a_step_of_all(rank: Rank) -> None:
    for _ in range(3):
        run(rank, [(kind, 40) for kind in KINDS], 1)


def change(path: Path, how: Callable[[dict[str, Any]], None]) -> Path:
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"]:
        how(event)
    path.write_text(json.dumps(trace))
    return path


@pytest.mark.timeout(120)
def test_times_that_contradict_each_other_end_in_a_report_or_an_error(tmp_path: Path) -> None:
    for seed in range(40):
        chance = random.Random(seed)

        def scramble(event: dict[str, Any], chance: random.Random = chance) -> None:
            if chance.random() < 0.3:
                event["ts"] += chance.uniform(-500, 500)
            if chance.random() < 0.1:
                event["dur"] = chance.choice([0, -3, 1e6])

        path = change(Machine(a_step_of_all).save(tmp_path)[0], scramble)
        with suppress(TraceError):
            json.dumps(report_json(diagnose(read_traces([path]))), allow_nan=False)


def test_work_that_takes_no_time_is_no_loss(tmp_path: Path) -> None:
    def shorten(event: dict[str, Any]) -> None:
        if event["cat"] == "kernel":
            event["dur"] = 0

    path = change(Machine(lambda rank: run(rank, [("kernel", 40)], 3)).save(tmp_path)[0], shorten)
    assert diagnose(read_traces([path])).view.losses == []


def test_work_that_no_call_launched_says_so(tmp_path: Path) -> None:
    def shift(event: dict[str, Any]) -> None:
        if event["cat"] == "kernel":
            event["args"]["correlation"] += 1_000_000

    path = change(Machine(lambda rank: run(rank, [("kernel", 40)], 3)).save(tmp_path)[0], shift)
    with pytest.raises(TraceError, match="other correlations"):
        diagnose(read_traces([path]))
