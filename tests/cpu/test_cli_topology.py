"""``crossfade topology`` on a machine without a GPU: what it shows, what it refuses, and what a calibration leaves in its file."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from crossfade.cli.exits import UsersMistake
from crossfade.cli.topology import bar, run_steps, show_topology
from crossfade.errors import DeviceError
from crossfade.profile.steps import steps_for
from crossfade.topology import Launch, Rate, Slowdown, load_topology, save_topology
from tests.helpers.clocked_crew import ClockedCrew
from tests.helpers.command_line import console, text_of
from tests.helpers.gpus import num_gpus
from tests.helpers.made_up import A, B, found, measured
from tests.helpers.programs import environment, python

pytestmark = pytest.mark.timeout(60)


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = environment(COLUMNS="120", XDG_CACHE_HOME=str(folder / "cache"))
    return python("-m", "crossfade", "topology", *arguments, cwd=folder, env=variables)


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table with this title, without its heading."""
    lines = text.partition(title)[2].splitlines()[1:]
    table = lines[: next(at for at, line in enumerate(lines) if line.startswith("└")) + 1]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table if line.startswith("│")]


def test_show_prints_tables_with_bars(tmp_path: Path) -> None:
    save_topology(measured(), tmp_path / "kept.json")
    ran = command("--show", "kept.json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    links = rows(ran.stdout, "Links")
    assert len(links) == 6
    # copy: 64 MB in 200 us; nccl: in 300, two thirds of it; staged: 1 MB in 60
    assert links[0] == [
        "0 → 1",
        "nvlink",
        f"{bar(1.0)} 336",
        f"{bar(0.052).strip():12} 17",
        f"{bar(2 / 3)} 224".strip(),
        "8.0",
    ]
    assert rows(ran.stdout, "One transfer")[0] == ["1 MB", "10.0 (104.9)", "60.0 (17.5)", "30.0 (35.0)"]
    assert [row[0] for row in rows(ran.stdout, "Several at once")] == [
        "0 → 1, 2",
        "0 → 1; 1 → 2; 2 → 0",
        "1 → 0; 2 → 0",
    ]
    assert [row[-1] for row in rows(ran.stdout, "Several at once")] == ["0.40", "1.00", "0.67"]
    assert rows(ran.stdout, "Side by side")[0] == ["nccl", "gemm", "1.50", "1.10"]
    assert rows(ran.stdout, "To enqueue one") == [["0", "4.00", "5.50"]]
    assert re.search(r"GPU-c +│ +132 │ +141", ran.stdout)


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, ""), (1, "████"), (0.5, "██"), (0.53125, "██▏"), (2, "████"), (-1, "")]
)
def test_a_bar(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn.ljust(4)


def test_a_file_that_is_not_there_or_is_something_else_is_the_user_s_mistake(tmp_path: Path) -> None:
    ran = command("--show", "none.json", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "cannot read none.json: No such file" in ran.stderr
    (tmp_path / "other.json").write_text("{}")
    ran = command("--show", "other.json", folder=tmp_path)
    assert ran.returncode == 2
    assert "other.json: this is no topology" in ran.stderr
    assert "hint: `crossfade topology --json FILE` writes a new one" in ran.stderr


def test_odd_names_and_crowds_of_links_that_are_not_listed_are_shown() -> None:
    device, *others = measured().devices
    odd = replace(
        measured(),
        devices=(replace(device, name="[/odd] [red]"), *others),
        links=(replace(measured().link(B, A), rates=(Rate("[/by]", 1, 1.0),)),),
        slowdowns=(Slowdown("[/by]", "[/work]", 1.0, 1.0),),
        launches=(Launch(A, "[/launch]", 1.0),),
    )
    out = console()
    show_topology(out, odd)
    text = text_of(out)
    for name in ("[/odd] [red]", "[/by]", "[/work]", "[/launch]"):
        assert name in text
    assert [row[-1] for row in rows(text, "Several at once")] == ["", "", ""]


def test_without_a_home_a_file_has_to_be_named(no_home: None) -> None:
    with pytest.raises(
        UsersMistake, match=r"home directory.\nhint: name a file with --json, or set CROSSFADE_CACHE_DIR"
    ):
        run_steps(console(), found(2), ClockedCrew(2), None, 100.0)


def test_what_is_no_regular_file_is_written_to_and_not_read() -> None:
    reading, writing = os.pipe()
    try:
        run_steps(console(), found(1), ClockedCrew(1), Path(f"/proc/self/fd/{writing}"), 100.0)
        assert os.read(reading, 1 << 16).startswith(b"{")
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(num_gpus() > 0, reason="there are GPUs here, which tests/gpu2 measures")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    ran = command("--json", "new.json", folder=tmp_path)
    assert ran.returncode in (1, 2)  # no GPU, or no package for one
    assert ran.stderr.startswith("error: ")
    assert "hint: " in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_prints_and_keeps_what_it_measured(tmp_path: Path) -> None:
    out, path = console(), tmp_path / "kept.json"
    run_steps(out, found(3), ClockedCrew(3), path, 100.0)
    text = text_of(out)
    assert f"written to {path}" in text
    assert "not measured" not in text
    kept = load_topology(path)
    assert kept is not None
    again = console()
    show_topology(again, kept)
    assert text_of(again) in text


def test_steps_that_fail_are_told_and_older_figures_stay(tmp_path: Path) -> None:
    path = save_topology(measured(), tmp_path / "kept.json")
    out = console()
    run_steps(out, found(3), ClockedCrew(3, problems={"copy 0 -> 1": "GPU 1 [fell] asleep"}), path, 100.0)
    assert "not measured: copy 0 -> 1: GPU 1 [fell] asleep" in text_of(out)
    kept = load_topology(path)
    assert kept is not None
    assert kept.link(A, B).duration_us("copy", 3 << 20) == 20.0  # the older one
    assert kept.link(B, A).duration_us("copy", 64 << 20) != 200.0


def test_what_came_before_an_interrupt_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    crew = ClockedCrew(2, problems={"copy 1 -> 0": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        run_steps(console(), found(2), crew, path, 100.0)
    kept = load_topology(path)
    assert kept is not None
    assert kept.link(A, B).transports == ("copy",)
    assert kept.link(B, A).transports == ()
    assert crew.num_closed == 1


def test_if_nothing_can_be_measured_nothing_is_written(tmp_path: Path) -> None:
    path, out = tmp_path / "kept.json", console()
    crew = ClockedCrew(2, problems={str(step): "broken" for step in steps_for(found(2))})
    with pytest.raises(DeviceError, match="nothing could be measured"):
        run_steps(out, found(2), crew, path, 100.0)
    assert "not measured: copy 0 -> 1: broken" in text_of(out)
    assert not path.exists()
