"""A run of the planted programs: what it writes, that it goes on after one that takes too long, and that it repeats nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.doctor import run


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, object]]:
    command = ["run", str(folder), "--ranks", "2", "--small", "--rounds", "1", "--steps", "1", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    run.main()
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_results_and_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = start(tmp_path, monkeypatch, "--only", "batches_in_sequence")
    assert (result["name"], result["cause"], result["num_ranks"]) == ("batches_in_sequence", "launch_order", 2)
    assert result["gains"] == [result["gain"]], "one round"
    names = {f"batches_in_sequence-0-{side}-{rank}.json.gz" for side in ("cause", "fixed") for rank in range(2)}
    recorded = {name.replace("cause", "cause.record").replace("fixed", "fixed.record") for name in names}
    assert {path.name for path in tmp_path.glob("*.gz")} == names | recorded
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert start(tmp_path, monkeypatch, "--only", "batches_in_sequence") == [result]
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}, "nothing ran again"


def test_programs_of_one_gpu_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["healthy_transformer", "healthy_convnet"]
    results = start(tmp_path, monkeypatch, "--only", *names)
    assert sorted(str(result["name"]) for result in results) == sorted(names)
    recorded = [json.loads(line)["name"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert sorted(recorded) == sorted(names)
    assert {path.name for path in tmp_path.glob("*-cause-*.gz")} == {
        "healthy_transformer-0-cause-0.json.gz",
        "healthy_convnet-0-cause-1.json.gz",
    }


def test_a_program_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_START_S", 0.0)
    results = start(tmp_path, monkeypatch, "--limit", "0.3", "--no-record", "--only", "slow_rank", "contended")
    assert [result["name"] for result in results] == ["slow_rank", "contended"]
    assert all("took longer" in str(result["error"]) for result in results)


def test_a_program_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        start(tmp_path, monkeypatch, "--only", "slow_rnk")
