"""``crossfade doctor`` as a user runs it, on recorded traces."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfade.cli.main import app
from tests.helpers.gpu_traces import Machine, Rank

TRACES = Path(__file__).parents[1] / "data" / "traces"


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "140"})
    return result.exit_code, result.stdout, result.stderr


def test_a_screen() -> None:
    code, out, _ = run(TRACES / "pageable_each_layer.json.gz")
    assert code == 0
    assert "1. copies of pageable memory block the host" in out
    assert "pin_memory" in out
    assert len(out.splitlines()) < 50, "a report is one screen"
    assert gc.isenabled(), "a command leaves it as it was"


def test_a_healthy_program() -> None:
    code, out, _ = run(TRACES / "healthy_convnet.json.gz")
    assert code == 0
    assert "Nothing found whose fix would win 5 % of the step." in out


def test_json() -> None:
    code, out, _ = run(TRACES / "free_each_layer.json.gz", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["diagnoses"][0]["cause"] == "allocator"
    assert report["replay_error"] < 0.01
    assert report["metrics"][0]["label"] == "rank 0"


def test_a_page(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, _ = run(TRACES / "nonzero_each_layer.json.gz", "--html", page)
    assert code == 0
    assert str(page.name) in out.replace("\n", "")
    assert "the host waits for the GPU in aten::nonzero" in page.read_text(encoding="utf-8")
    code, _, err = run(TRACES / "nonzero_each_layer.json.gz", "--html", tmp_path / "none" / "report.html")
    assert code == 2
    assert "there is no folder" in err


def test_what_cannot_be_read_is_told_everywhere(tmp_path: Path) -> None:
    def program(rank: Rank) -> None:
        for _ in range(5):
            rank.kernel(300)

    trace, page = tmp_path / "trace.json", tmp_path / "report.html"
    (path,) = Machine(program).save(tmp_path)
    trace.write_text(json.dumps({**json.loads(path.read_text()), "baseTimeNanoseconds": "x"}))
    told = "baseTimeNanoseconds could not be read"
    assert told in run(trace, "--html", page)[1]
    assert told in page.read_text(encoding="utf-8")
    assert told in run(trace, "--json")[1]


def test_a_folder_of_ranks(tmp_path: Path) -> None:
    def program(rank: Rank) -> None:
        for _ in range(5):
            for _ in range(4 if rank.number else 3):
                rank.kernel(300)
            rank.all_reduce(80, 1 << 20)()
            rank.kernel(20, "optimizer")

    Machine(program, 2).save(tmp_path)
    code, out, _ = run(tmp_path)
    assert code == 0
    assert "rank 1 is the last to start" in out
    assert "allreduce" in out


@pytest.mark.parametrize(
    ("content", "message"), [("", "is empty"), ("{}", 'has no "traceEvents"'), ("[1, 2", "is damaged or truncated")]
)
def test_what_cannot_be_read_is_the_users_mistake(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    code, _, err = run(path)
    assert gc.isenabled()
    assert code == 2
    assert message in err
    assert "hint: " in err


def test_an_empty_folder(tmp_path: Path) -> None:
    code, _, err = run(tmp_path)
    assert code == 2
    assert "no traces in" in err


def test_the_readme_has_what_is_printed() -> None:
    """Without the first line, up to the tables."""
    readme = (TRACES.parents[2] / "README.md").read_text()
    _, shown = readme.split("$ crossfade doctor tests/data/traces/", 1)
    command, text = shown.split("```")[0].split("\n", 1)
    _, out, _ = run(TRACES / command.split()[0])
    printed = "\n".join(line.rstrip() for line in out.splitlines()[2:])
    assert printed.startswith(text.rstrip())


def test_a_step_as_a_picture_and_as_a_trace(tmp_path: Path) -> None:
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    code, out, _ = run(TRACES / "pageable_each_layer.json.gz", "--timeline", picture)
    assert code == 0
    assert "now and after the fix" in out
    assert "<svg" in picture.read_text()
    assert "with the fix" in picture.read_text()
    assert run(TRACES / "pageable_each_layer.json.gz", "--timeline", trace)[0] == 0
    ends: dict[int, float] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            ends[event["pid"]] = max(ends.get(event["pid"], 0.0), event["ts"] + event["dur"])
    now, fixed = ends.values()
    assert fixed < 0.8 * now, "a third and more is won"
    code, _, err = run(TRACES / "pageable_each_layer.json.gz", "--timeline", tmp_path / "step.png")
    assert code == 2
    assert ".svg or .json" in err
