"""`crossfade.record` and ``crossfade record`` without a GPU: what is written, and what the doctor says of it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

import crossfade
from crossfade.cli.main import app
from crossfade.device.clocks import GpuClocks
from crossfade.profile.recording.calls import CallLog
from crossfade.profile.recording.machine import GpuSampler, environment
from crossfade.profile.traces.record import Record
from crossfade.profile.traces.roles import Role
from tests.helpers.nvml import FakeNvml
from tests.helpers.programs import environment as clean
from tests.helpers.warm import TORCH_AND_COMPILERS, warm_python


def contents(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def test_a_trace_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    before = after = 0
    with crossfade.record(tmp_path / "made") as recording:
        for number in range(3):
            before = time.time_ns()
            torch.ones(8) @ torch.ones(8, 8)
            gpu_trace.EventRecordCallbacks.fire_callbacks(0xE0 + number, 0x50)
            gpu_trace.EventWaitCallbacks.fire_callbacks(0xE0 + number, 0x51)
            gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(0x50)
            after = time.time_ns()
            recording.step()
    gpu_trace.EventRecordCallbacks.fire_callbacks(0xFF, 0x50)  # nobody listens any more
    assert recording.path == tmp_path / "made" / "rank0.json.gz"
    assert repr(recording) == f"Recording({str(recording.path)!r})"
    trace = contents(recording.path)
    record = Record.read(trace["crossfade"])
    assert [entry.role for entry in record.entries] == [Role.RECORD, Role.WAIT_EVENT, Role.SYNC_STREAM] * 3
    assert [entry.event for entry in record.entries[6:]] == [0xE2, 0xE2, 0]
    assert {entry.thread for entry in record.entries} == {threading.get_native_id()}
    assert before <= record.entries[-1].time_ns <= after
    assert record.environment["NCCL_ALGO"] == "Ring"
    steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")]
    assert len(steps) == 4
    products = [
        event
        for event in trace["traceEvents"]
        if event.get("name") == "aten::mv" or event.get("name") == "aten::matmul"
    ]
    last = max(event["ts"] for event in products) * 1e3 + trace["baseTimeNanoseconds"]
    assert before - 20_000 <= last <= after, "the trace and the record have one clock"
    assert products[0]["tid"] == threading.get_native_id()


def test_some_steps_are_timed_before_the_trace(tmp_path: Path) -> None:
    with crossfade.record(tmp_path, untraced_steps=3) as recording:
        for number in range(5):
            gpu_trace.EventRecordCallbacks.fire_callbacks(0xE0 + number, 0x50)
            time.sleep(0.03 if number < 3 else 0.0)
            recording.step()
    assert recording.path is not None
    trace = contents(recording.path)
    record = Record.read(trace["crossfade"])
    assert 30_000 <= record.untraced_us < 300_000
    assert [entry.event for entry in record.entries] == [0xE3, 0xE4]
    assert trace["crossfade"]["num_steps"] == 2


def test_a_hiccup_in_an_untraced_step_is_not_counted(tmp_path: Path) -> None:
    with crossfade.record(tmp_path, untraced_steps=5) as recording:
        for number in range(6):
            time.sleep(1.5 if number == 1 else 0.03)
            recording.step()
    assert recording.path is not None
    assert 30_000 <= contents(recording.path)["crossfade"]["untraced_us"] < 300_000


def test_what_operators_read_and_write(tmp_path: Path) -> None:
    with crossfade.record(tmp_path, with_tensors=True) as recording:
        a = torch.ones(8, 8)
        b = a.t() @ a
        a.add_(b)
    assert recording.path is not None
    trace = contents(recording.path)
    uses = {use.operator: use for use in Record.read(trace["crossfade"]).tensors}
    names = {
        event["name"]: event["args"]["Record function id"]
        for event in trace["traceEvents"]
        if "aten::" in event["name"]
    }
    (made,) = uses[names["aten::ones"]].writes
    view, product, added = (uses[names[f"aten::{name}"]] for name in ("t", "mm", "add_"))
    assert (list(view.reads), list(view.writes)) == ([made], [made]), "a view is of the same storage"
    assert made in product.reads
    assert set(added.reads) == {made, *product.writes}
    assert list(added.writes) == [made]


def test_a_block_without_a_traced_step(tmp_path: Path) -> None:
    recording = crossfade.record(tmp_path, untraced_steps=3)

    def two_steps() -> None:
        with recording:
            for _ in range(2):
                recording.step()

    with pytest.raises(crossfade.TraceError, match=r"after 2 steps, and 3 were not to be traced.*\nhint: "):
        two_steps()
    assert recording.path is None
    assert list(tmp_path.iterdir()) == []


def test_there_is_one_profiler_at_a_time(tmp_path: Path) -> None:
    recording = crossfade.record(tmp_path)
    with (
        pytest.raises(crossfade.TraceError, match=r"ran a profiler of its own.*\nhint: "),
        recording,
        profile(activities=[ProfilerActivity.CPU]) as own,
    ):
        torch.ones(8) @ torch.ones(8, 8)
    assert recording.path is None
    assert own.key_averages()
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(crossfade.TraceError, match=r"runs already\nhint: "),
        crossfade.record(tmp_path),
    ):
        raise AssertionError("unreachable")
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    with crossfade.record(tmp_path):
        torch.ones(8) @ torch.ones(8, 8)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a trace of the CPU alone" in result.stderr


def test_the_trace_of_a_block_that_raises(tmp_path: Path) -> None:
    recording = crossfade.record(tmp_path)

    def fails() -> None:
        with recording:
            gpu_trace.EventRecordCallbacks.fire_callbacks(1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert recording.path is not None
    assert len(contents(recording.path)["crossfade"]["calls"]) == 1


def test_threads_have_their_own_numbers() -> None:
    seen: list[int] = []
    log = CallLog(seen.append)
    log.open(gpu_trace)
    thread = threading.Thread(target=log.event_synchronization, args=(7,))
    log.event_record(7, 1)
    thread.start()
    thread.join()
    log.close()
    (_, own, *_), (role, other, _, event, stream) = log.entries
    assert own != other
    assert (role, event, stream) == (Role.SYNC_EVENT, 7, 0)
    assert seen == [1, 0]


def test_a_torch_without_a_registry() -> None:
    log = CallLog(lambda _: None)
    log.open(SimpleNamespace(EventRecordCallbacks=gpu_trace.EventRecordCallbacks))
    gpu_trace.EventWaitCallbacks.fire_callbacks(1, 2)
    gpu_trace.EventRecordCallbacks.fire_callbacks(1, 2)
    log.close()
    assert [entry[0] for entry in log.entries] == [Role.RECORD]


def test_clocks_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = GpuSampler()
    sampler.open("GPU-1")
    assert nvml.is_failed.wait(10)
    sampler.close()
    assert not nvml.num_open
    assert [sample[1:] for sample in sampler.samples] == [(1500, 699.0)] * 2
    assert sampler.limits == {"max_mhz": 1980, "limit_w": 700.0}
    assert sampler.missing == "NVML: lost, after 2 samples"
    failing = GpuSampler()
    failing.open("GPU-1")
    failing.close()
    assert failing.missing == "NVML: lost"


def test_only_variables_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "CUDA_DEVICE_MAX_CONNECTIONS", "MY_SECRET"):
        monkeypatch.setenv(name, "1")
    assert environment().items() >= {"NCCL_DEBUG": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items()
    assert "MY_SECRET" not in environment()


SCRIPT = """
import sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("name", __name__, sys.argv[2:])
sys.exit(int(sys.argv[2]))
"""


def run(folder: Path, *arguments: str, text: str = SCRIPT, overwrites_freed: bool = False) -> tuple[int, str, str]:
    script = folder / "train.py"
    script.write_text(text)
    command = ["-m", "crossfade", "record", "-o", str(folder / "out"), *arguments[:-2], str(script), *arguments[-2:]]
    variables = clean(RANK="3", WORLD_SIZE="4")
    if overwrites_freed:  # the allocator reads that when a process starts, which a warm one has done
        variables["MALLOC_PERTURB_"] = "165"
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=variables,
            timeout=90,
            capture_output=True,
            text=True,
            check=False,
        )
    else:
        done = warm_python(TORCH_AND_COMPILERS, *command, cwd=folder, env=variables, timeout_s=90)
    return done.returncode, done.stdout, done.stderr


def inside_marks(trace: dict[str, Any]) -> list[str]:
    """Events that begin inside a mark of a step."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    marks = [event for event in events if event["name"].startswith("ProfilerStep#")]
    return [
        event["name"]
        for event in events
        for mark in marks
        if event["tid"] == mark["tid"] and mark["ts"] < event["ts"] < mark["ts"] + mark["dur"]
    ]


def test_some_steps_of_a_script(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "--skip", "2", "--steps", "3", "--with-tensors", "9", "0")
    assert code == 0
    path = tmp_path / "out" / "rank3.json.gz"
    assert "name __main__ ['0']" in out
    assert f"recorded: {path}\nthe doctor needs a trace of a GPU" in out
    code, out, _ = run(tmp_path, "--skip", "2", "--steps", "3", "--with-tensors", "9", "0")
    assert code == 0
    assert f"recorded: {path} (it replaces an earlier one)\n" in out
    trace = contents(path)
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 3
    assert sum(name.startswith("ProfilerStep#") for name in names) == 3
    assert not inside_marks(trace), "a mark is over before the program goes on"
    assert (trace["crossfade"]["rank"], trace["crossfade"]["world_size"]) == (3, 4)
    assert trace["crossfade"]["untraced_us"] > 0.0, "the last of the steps that are skipped are timed"
    assert trace["crossfade"]["tensors"]


def test_a_script_that_fails_or_ends_early(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "--skip", "12", "9", "0")
    assert code == 2
    assert "ended after 9 steps of an optimizer, and 12 were to be skipped" in err
    code, _, _ = run(tmp_path, "2", "7")
    assert code == 7
    assert (tmp_path / "out" / "rank3.json.gz").exists(), "what was recorded until then"


@pytest.mark.parametrize("options", [(), ("--skip", "3"), ("--skip", "1", "--steps", "2")])
def test_a_script_with_a_profiler_of_its_own_runs_to_its_end(tmp_path: Path, options: tuple[str, ...]) -> None:
    text = SCRIPT.replace("for _", "own = torch.profiler.profile()\nfor _").replace(
        "    model(", "    own.start()\n    model("
    )
    text = text.replace("r.step()", "r.step()\n    own.stop()")
    # torch crashes where a range outlives the profiler that it began in
    code, out, err = run(tmp_path, *options, "5", "0", text=text, overwrites_freed=not options)
    assert (code, "name __main__" in out) == (2, True), err
    assert "error: " in err
    assert "hint: torch has one profiler at a time" in err
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("error", ["OSError(28, 'odd')", "crossfade.TraceError('odd')", "BrokenPipeError('odd')"])
def test_what_a_script_raises_is_its_own_error(tmp_path: Path, error: str) -> None:
    code, _, err = run(tmp_path, "2", "0", text=SCRIPT.replace("sys.exit(", f"import crossfade\nraise {error}\n("))
    assert code == 1
    _, _, shown = err.rpartition("Traceback (most recent call last):\n")
    assert shown.startswith(f'  File "{tmp_path / "train.py"}", line 10, in <module>\n    raise {error}\n'), err
    assert "error: " not in err, "it is none of crossfade's"
    assert (tmp_path / "out" / "rank3.json.gz").exists(), "what was recorded until then"


def test_a_script_that_goes_to_another_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "beside.py").touch()
    (tmp_path / "go.py").write_text("import os\nos.chdir('elsewhere')\nimport beside\nopen(__file__).close()\n")
    command = ["-m", "crossfade", "record", "-o", "out", "go.py"]
    done = warm_python(TORCH_AND_COMPILERS, *command, cwd=tmp_path, env=clean(), timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert f"recorded: {tmp_path / 'out' / 'rank0.json.gz'}" in done.stdout
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_no_script(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["record", str(tmp_path / "none.py")])
    assert result.exit_code == 2
    assert "there is no file" in result.stderr


@pytest.mark.parametrize("missing", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetEnforcedPowerLimit", "nvmlInit"])
def test_a_gpu_that_cannot_be_read_is_told_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError(f"no {missing}")

    nvml = FakeNvml(2)
    monkeypatch.setattr(nvml, missing, fail)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    clocks = GpuClocks("GPU-1")
    assert clocks.missing == f"NVML: no {missing}"
    assert (clocks.read(), clocks.max_mhz, clocks.limit_w) == (None, 0.0, 0.0)
    assert not nvml.num_open
    clocks.close()
