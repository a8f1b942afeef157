"""Each example as its user runs it, a script in a process of its own; and what examples refuse."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.programs import environment, python
from tests.helpers.sessions import TORCH
from tests.helpers.two_at_a_time import Ran, two_at_a_time
from tests.helpers.warm import TORCH_AND_COMPILERS, warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 90
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FORKING_TORCHRUN = ("-m", "tests.helpers.torchrun")
SMALL = ["--window=16", "--batch=2", "--batches=5", "--width=16", "--heads=2", "--blocks=3", "--inflight=3"]

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


TEXT = "text.bin"
PRELOADING = ("gloo", "heterogeneous", "training", "tensor parallel")
"""Runs with several actors that use torch; those of the others are new interpreters."""
NEW = ("first program", "torchrun")
"""Runs of new interpreters, one of them torchrun's own."""
PIPELINES = {"shm": (TEXT,), "inline": ("--engine=inline",), "gloo": ("--transport=gloo", TEXT)}
PIPELINE = "pipeline_inference.py"
REFUSED = {
    "too little text": (PIPELINE, (TEXT, "--window=999"), "hint: give more text"),
    "no file": (PIPELINE, ("no_such_file",), "No such file"),
    "odd heads": (PIPELINE, (TEXT, "--heads=3"), "--heads divides --width"),
    **{
        f"{name} without a step": (f"{name}.py", ("--steps=0",), "error: --steps is at least 1")
        for name in ("heterogeneous_graph", "pipeline_training", "tensor_parallel_mlp")
    },
}
RUNS: dict[str, tuple[str, ...]] = {
    "first program": ("first_program.py",),
    **{name: (PIPELINE, *SMALL, *options) for name, options in PIPELINES.items()},
    "tensor parallel": ("tensor_parallel_inference.py", "--steps=2"),
    "tensor parallel MLP": ("tensor_parallel_mlp.py", "--steps=4", "--candidate=rounds"),
    "training": ("pipeline_training.py",),
    "signaled": ("signaled_product.py",),
    "torchrun": ("torchrun_product.py",),
    "ring": ("torchrun_p2p.py",),
    **{f"batches {name}": (f"torchrun_batches_{name}.py",) for name in ("prefill", "ddp", "experts")},
    "heterogeneous": ("heterogeneous_graph.py", "--steps=5"),
}


def write_text(folder: Path) -> None:
    (folder / TEXT).write_bytes(bytes(index * index % 251 for index in range(1000)))


def run(name: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    write_text(cwd)
    example, *arguments = RUNS[name]
    is_new = name in NEW or not TORCH
    launcher = (TORCHRUN if is_new else FORKING_TORCHRUN) if example.startswith("torchrun") else ()
    variables = environment(
        PYTHONPATH=os.pathsep.join(map(str, (ROOT / "src", ROOT))), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )
    if name in PRELOADING:
        variables["CROSSFADE_PRELOAD"] = ",".join(TORCH)
    command = (*launcher, str(EXAMPLES / example), *arguments)
    if is_new:
        return python(*command, cwd=cwd, env=variables, encoding="utf-8", timeout_s=LIMIT_S)
    return warm_python(TORCH_AND_COMPILERS, *command, cwd=cwd, env=variables, timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    with two_at_a_time({name: partial(run, name, tmp_path_factory.mktemp("run")) for name in RUNS}) as ran:
        yield ran


def test_each_example_is_run_here() -> None:
    programs = [path for path in EXAMPLES.glob("*.py") if '"__main__"' in path.read_text(encoding="utf-8")]
    assert len(programs) >= 4
    assert {path.name for path in (*programs, EXAMPLES / "first_program.py")} <= {run[0] for run in RUNS.values()}


def test_first_program(runs: Ran) -> None:
    ran = runs["first program"].result()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "[0.0, 2000.0, 4000.0, 6000.0, 8000.0]\n"


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_equals_the_unsplit_model(name: str, runs: Ran) -> None:
    pytest.importorskip("torch")
    ran = runs[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all 5 batches equal bit for bit" in ran.stdout
    whole, split = re.findall(r"loss (\S+) +(\S+) tokens/s", ran.stdout)
    assert whole[0] == split[0]
    assert 4.0 < float(whole[0]) < 8.0  # random weights: near ln 256
    assert min(float(rate.replace(",", "")) for _, rate in (whole, split)) > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    example, arguments, said = REFUSED[name]
    write_text(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / example))["main"](arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "begins", "differs_by", "most"),
    [
        ("tensor parallel", "2 ranks on ", "differ by at most", 1e-3),
        ("tensor parallel MLP", "2 ranks, 4 steps: the split block's loss goes from ", "differs by at most", 1e-4),
        ("signaled", r"2 ranks on \w+, 8 groups of rows", "product by", 0.02),
    ],
)
def test_split_work_agrees_with_the_unsplit(runs: Ran, name: str, begins: str, differs_by: str, most: float) -> None:
    pytest.importorskip("torch")
    ran = runs[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.match(begins, ran.stdout)
    assert float(re.findall(rf"{differs_by} (\S+)", ran.stdout)[0]) < most


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("inline", r"5 batches of 2 windows of 16 bytes"),  # of the documentation, by default
        ("torchrun", r"2 of 2 ranks have the whole layer's output\n\Z"),
        ("ring", r"2 of 2 ranks have the attention over the whole sequence\n\Z"),
        ("batches prefill", r"way: [\s\S]*equal to the model on one device: True\n\Z"),
        ("batches ddp", r"way: [\s\S]*parameters equal on all ranks: True\n\Z"),
        ("batches experts", r"way: process groups\n[\s\S]*2 of 2 ranks have the whole batch's output\n\Z"),
        ("heterogeneous", r"5 texts, [\s\S]*prepared on cpu"),
    ],
)
def test_an_example_says_what_it_did(runs: Ran, name: str, said: str) -> None:
    pytest.importorskip("torch")
    ran = runs[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.match(said, ran.stdout)


def test_losses_of_1f1b_training_equal_the_unsplit_model(runs: Ran) -> None:
    pytest.importorskip("torch")
    ran = runs["training"].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, last = (float(loss) for loss in re.findall(r"([0-9.]+) before", ran.stdout))
    assert last < first
    if "on cpu" in ran.stdout:
        assert "all losses of 20 steps equal the unsplit model's bit for bit" in ran.stdout
