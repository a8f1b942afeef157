"""``crossfade demo``: what it prints, measures, draws and writes, with torch and without."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from crossfade.cli.demo import fold_grid, run_demo
from crossfade.cli.exits import UsersMistake
from crossfade.cli.fan_in import ON_CPU, Burst, FanIn, Measured, measure
from crossfade.plan.parse import parse_plan
from crossfade.plan.picture import draw_timelines
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Span, Timeline
from tests.helpers.command_line import crossfade_command

QUICK = "import crossfade.cli.demo as demo; demo.NUM_BURSTS = 2; demo.NUM_GLOO_BURSTS = 1; demo.NUM_ROUND_TRIPS = 20"
NO_TORCH = "import sys; sys.modules['torch'] = None"


@pytest.mark.parametrize("name", ["timeline.svg", "overlap.svg", "predicted.json", "measured.json", "plan.txt"])
def test_demo_says_at_once_what_it_cannot_write(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsersMistake, match=rf"cannot write .*{name}: Is a directory\nhint: "):
        run_demo(tmp_path, "inline")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_demo_without_torch(tmp_path: Path) -> None:
    done = crossfade_command("demo", "--output", "out/new", folder=tmp_path, before=f"{NO_TORCH}\n{QUICK}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing is copied" in done.stdout
    assert "(0 arrays were copied out)" in done.stdout
    assert "pip install 'crossfade[torch]'" in done.stdout
    files = tmp_path / "out" / "new"
    assert sorted(path.name for path in files.iterdir()) == [
        "measured.json",
        "plan.txt",
        "predicted.json",
        "timeline.svg",
    ]
    plan = parse_plan((files / "plan.txt").read_text())
    for name in ("measured", "predicted"):
        events = json.loads((files / f"{name}.json").read_text())["traceEvents"]
        assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == set(plan.programs)
        runs = [
            event for event in events if event.get("cat") == "compute" and event["args"]["action"].startswith("run ")
        ]
        assert len(runs) == 6 * len(plan.nodes)
    assert "predicted: " in (files / "timeline.svg").read_text()
    shares = dict(re.findall(r"│ (\w+) +│ +([0-9.]+)% │", done.stdout))
    assert set(shares) == set(plan.programs)
    assert float(shares["Receiver"]) > float(shares["Sender0"])


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_demo_with_torch_shows_what_overlap_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFADE_PRELOAD", "torch")  # four actors take three seconds each to import it
    done = crossfade_command("demo", folder=tmp_path, before=QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"With overlap an execution takes (\d+% (less|more) time|as long) ", done.stdout)
    hidden = dict(re.findall(r"│ (\w+ overlap) +│ +[0-9.]+ │ +[0-9.]+% │ +([0-9.]+)% │", done.stdout))
    assert float(hidden["with overlap"]) > float(hidden["without overlap"]) == 0.0
    ElementTree.parse(tmp_path / "demo-output" / "overlap.svg")


def test_demo_on_the_inline_engine(tmp_path: Path) -> None:
    done = crossfade_command("demo", "--engine", "inline", folder=tmp_path, before=QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert "engine inline" in done.stdout


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_the_demos_program_on_gpus_is_right_also_on_the_cpu(inline: None) -> None:
    from crossfade.cli import gpu_actors

    size = 64
    parts = replace(
        gpu_actors.on_gpus(4),
        sender_args=(size, "cpu"),
        receiver_args=(size, "cpu"),
        num_gpus=0,
        expected=lambda number, execution: gpu_actors.expected(number, execution, size),
    )
    assert (parts.num_senders, gpu_actors.on_gpus(2).num_senders) == (3, 1)
    program = FanIn(parts)
    with program.compile() as graph:
        (measured,) = measure(program, [graph], 1)  # raises if a result is wrong
    assert len(measured.bursts) == 1


def test_what_an_action_took_on_a_gpu_counts_before_what_its_host_took(inline: None) -> None:
    plan = FanIn().compile().plan
    spans = [
        Span("Sender0", stream, label, "make", kind, 0, 10.0, 10.0 + duration_us)
        for stream, label, kind, duration_us in (
            ("main", "run n0", "compute", 20.0),
            ("compute", "run n0", "compute", 500.0),
            ("main", "write n0", "communicate", 9.0),
            ("main", "write n0", "wait", 70.0),
        )
    ]
    measured = Measured(ON_CPU, plan, (Burst(Timeline.of("measured", spans), (600.0,)),))
    assert measured.took_us("run n0") == [500.0]
    assert measured.durations_us("run n0") == [20.0]
    assert measured.took_us("write n0") == [9.0]


def test_a_wrong_result_gives_exit_code_1(tmp_path: Path) -> None:
    lie = "import crossfade.cli.fan_in as fan_in; fan_in.FanIn.expected = lambda self, execution: [1, 2, 3]"
    done = crossfade_command("demo", folder=tmp_path, before=f"{NO_TORCH}\n{QUICK}\n{lie}")
    assert done.returncode == 1
    assert re.match(
        r"error: the result of execution 0 is \[\d+, \d+, \d+\], and should be \[1, 2, 3\]\nhint: ", done.stderr
    )
    assert "Traceback" not in done.stderr


def test_the_grid_is_folded_and_loses_nothing(inline: None) -> None:
    plan: Plan = FanIn().compile().plan
    whole = fold_grid(plan, 10_000)
    assert whole.splitlines() == str(plan).splitlines()[-len(plan.programs) :]
    for width in (40, 80, 120):
        folded = fold_grid(plan, width)
        assert max(map(len, folded.splitlines())) <= width
        for name, actions in plan.programs.items():
            rows = [line for line in folded.splitlines() if line.split(" ")[0] == name]
            cells = [cell.strip() for row in rows for cell in row.split(" | ")[1:]]
            assert [cell for cell in cells if cell] == [str(action) for action in actions]


def test_bursts_start_at_zero_and_count_their_own_executions(inline: None) -> None:
    program = FanIn()
    with program.compile() as graph:
        (measured,) = measure(program, [graph], 2)
    assert len(measured.bursts) == 2
    for burst in measured.bursts:
        assert min(span.start_us for span in burst.timeline.spans) == 0
        runs = [(span.execution, span.label) for span in burst.timeline.spans if span.label.startswith("run ")]
        assert sorted(runs) == [(execution, f"run n{n}") for execution in range(6) for n in range(6)]
    for shares in measured.shares().values():
        assert 0 <= shares.compute + shares.exposed <= 1 + 1e-9
    predicted = measured.predicted()
    assert predicted.makespan_us >= 6 * 3 * 0.9 * min(measured.durations_us("run n3"))


def spans_of(*places: tuple[str, int, float, float]) -> Timeline:
    """Spans (kind, execution, start, end) of one actor, all on its main stream."""
    return Timeline.of("made", [Span("A", "main", "run n0", "A.f", *place) for place in places])


def test_in_pictures_waiting_lies_behind_what_the_stream_does_meanwhile() -> None:
    svg = draw_timelines([spans_of(("wait", 0, 0, 100), ("communicate", 0, 20, 80))])
    names = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "A" in names
    assert "A main 2" not in names
    assert svg.index('<rect class="wait"', svg.index(">A<")) < svg.index('<rect class="communicate"', svg.index(">A<"))


def test_in_pictures_a_wide_bar_keeps_its_name_and_executions_differ_in_shade() -> None:
    svg = draw_timelines([spans_of(("compute", 0, 0, 500), ("compute", 0, 500, 500.01), ("compute", 1, 510, 1000))])
    root = ElementTree.fromstring(svg)
    labels = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if "#" in (text.text or "")]
    assert labels == ["run n0 A.f #0", "run n0 A.f #1"]
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("class") == "compute" and len(bar)]
    assert len({bar.get("fill") for bar in bars}) == len(bars) == 2
