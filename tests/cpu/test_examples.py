"""Each example as its user runs it: a script in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 90
SMALL = ["--window=16", "--batch=2", "--batches=5", "--width=16", "--heads=2", "--blocks=3", "--inflight=3"]

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def run(example: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(index * index % 251 for index in range(1000)))
    return path


def test_each_example_is_run_here() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    programs = [path for path in EXAMPLES.glob("*.py") if '"__main__"' in path.read_text(encoding="utf-8")]
    assert len(programs) >= 4
    assert all(f'run("{path.name}"' in tests for path in (*programs, EXAMPLES / "first_program.py"))


def test_first_program(tmp_path: Path) -> None:
    ran = run("first_program.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[0.0, 2000.0, 4000.0, 6000.0, 8000.0]\n"


@pytest.mark.parametrize("options", [[], ["--engine=inline"], ["--transport=gloo"]], ids=["shm", "inline", "gloo"])
def test_pipeline_equals_the_unsplit_model(options: list[str], text_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ran = run("pipeline_inference.py", *SMALL, *options, str(text_file), cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all 5 batches equal bit for bit" in ran.stdout
    whole, split = re.findall(r"loss (\S+) +(\S+) tokens/s", ran.stdout)
    assert whole[0] == split[0]
    assert 4.0 < float(whole[0]) < 8.0  # random weights: near ln 256
    assert min(float(rate.replace(",", "")) for _, rate in (whole, split)) > 0


def test_pipeline_reads_the_documentation_by_default(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ran = run("pipeline_inference.py", *SMALL, "--engine=inline", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("5 batches of 2 windows of 16 bytes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text.bin", "--window=999"], "hint: give more text"),
        (["no_such_file"], "No such file"),
        (["text.bin", "--heads=3"], "--heads divides --width"),
    ],
    ids=["too little text", "no file", "odd heads"],
)
def test_pipeline_refuses_what_makes_no_sense(
    arguments: list[str], message: str, text_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    ran = run("pipeline_inference.py", *arguments, cwd=text_file.parent)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_tensor_parallel_inference_agrees_with_the_unsplit_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ran = run("tensor_parallel_inference.py", "--steps=2", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("2 ranks on ")
    assert float(re.findall(r"differ by at most (\S+)", ran.stdout)[0]) < 1e-3


def test_losses_of_1f1b_training_equal_the_unsplit_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ran = run("pipeline_training.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, last = (float(loss) for loss in re.findall(r"([0-9.]+) before", ran.stdout))
    assert last < first
    if "on cpu" in ran.stdout:
        assert "all losses of 20 steps equal the unsplit model's bit for bit" in ran.stdout


def test_heterogeneous_graph_equals_plain_calls(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ran = run("heterogeneous_graph.py", "--steps=5", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("5 texts, ")
    assert "prepared on cpu" in ran.stdout
