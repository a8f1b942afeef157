"""What the judge of the planted programs counts, and what it sets aside."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.doctor import judge
from benchmarks.doctor.slim import slim
from tests.helpers.gpu_traces import Machine, Rank

WIDE, NARROW = [0.02, 0.04, 0.055, 0.07, 0.09], [0.049, 0.06, 0.06, 0.061, 0.07]


def launch_bound(rank: Rank) -> None:
    for _ in range(6):
        for _ in range(40):
            rank.python(20)
            rank.kernel(9, "small", 8)
        rank.kernel(60, "optimizer")


Judged = Callable[..., str]
"""What the judge prints of one result, whose two sides are the same program."""


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Judged:
    (trace,) = Machine(launch_bound).save(tmp_path)
    for side in ("cause", "fixed"):
        (tmp_path / f"planted-0-{side}-0.json.gz").write_bytes(gzip.compress(trace.read_bytes()))
    monkeypatch.setattr(sys, "argv", ["judge", str(tmp_path)])

    def run(**result: object) -> str:
        line = json.dumps({"name": "planted", "seed": 0, "gain": 0.055, **result})
        (tmp_path / "results.jsonl").write_text(line + "\n")
        judge.main()
        return capsys.readouterr().out

    return run


def test_a_right_answer(judged: Judged) -> None:
    out = judged(cause="launch_bound", gains=NARROW)
    assert "right first cause: 1 of 1" in out
    assert "does: 0" in out
    assert "1 of 1 traces" in out, "its fixed side is the same program here"


def test_a_gain_that_the_rounds_do_not_tell(judged: Judged) -> None:
    out = judged(cause="launch_bound", gains=WIDE)
    assert "right first cause: 0 of 0" in out
    assert "does: 1" in out


def test_another_cause_is_wrong_there_too(judged: Judged) -> None:
    out = judged(cause="allocator", gains=WIDE)
    assert "right first cause: 0 of 1" in out
    assert "does: 0" in out


def test_a_program_without_a_cause_is_never_set_aside(judged: Judged) -> None:
    assert "2 of 2 traces" in judged(cause="", gains=WIDE)


@pytest.mark.parametrize("mark_us", [0.5, 90.0])
def test_a_slim_trace_keeps_the_first_steps_and_what_the_gpu_does_for_them(mark_us: float) -> None:
    events: list[dict[str, object]] = []
    for step in range(3):
        at, own = 100.0 * step, {"correlation": step}
        for kind in ("user_annotation", "gpu_user_annotation"):
            events.append(
                {"ph": "X", "cat": kind, "name": f"ProfilerStep#{step}", "ts": at, "dur": mark_us, "args": {}}
            )
        events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 5, "dur": 3.0, "args": own}
        )
        events.append({"ph": "X", "cat": "kernel", "name": f"{step}", "ts": at + 150, "dur": 20.0, "args": own})
    kept = slim({"traceEvents": events}, 2)["traceEvents"]
    assert [event["name"] for event in kept if event["cat"] == "kernel"] == ["0", "1"]
    assert [event["name"] for event in kept if event["cat"] == "user_annotation"] == [
        "ProfilerStep#0",
        "ProfilerStep#1",
    ]
    assert len(slim({"traceEvents": events})["traceEvents"]) == 9
