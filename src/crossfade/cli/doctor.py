"""``crossfade doctor``: what holds a traced program back, on one screen, as JSON, or as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax

from crossfade.cli.exits import UsersMistake
from crossfade.cli.garbage import uncollected
from crossfade.cli.shown import new_table
from crossfade.files import replace_file
from crossfade.plan.chrome import chrome_json
from crossfade.plan.picture import draw_timelines
from crossfade.profile.doctor.diagnosis import Diagnosis, Report, diagnose
from crossfade.profile.doctor.metrics import collective_metrics, rank_metrics
from crossfade.profile.doctor.page import page
from crossfade.profile.doctor.report import gain_text, headline, report_json, report_page
from crossfade.profile.doctor.timeline import one_step
from crossfade.profile.doctor.view import share
from crossfade.profile.traces.reader import read_traces

_WRITERS = {".svg": draw_timelines, ".json": chrome_json}
_MOST_REMARKS = 3
_MOST_COLLECTIVES = 5


@uncollected()
def examine(traces: Sequence[Path], *, is_json: bool, html: Path | None, timeline: Path | None = None) -> None:
    """Reads the traces of a run and prints the diagnosis."""
    for path in (html, timeline):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsersMistake(f"there is no folder {path.parent}", hint="name a file in a folder that exists")
    if timeline is not None and timeline.suffix not in _WRITERS:
        raise UsersMistake(
            f"{timeline.name} is neither a picture nor a trace", hint="name a file that ends with .svg or .json"
        )
    report = diagnose(read_traces(files_of(traces)))
    if is_json:
        print(json.dumps(report_json(report), indent=1))
    else:
        _show(Console(highlight=False), report)
    if html is not None:
        replace_file(html, page(report_page(report)))
    if timeline is not None:
        replace_file(timeline, _WRITERS[timeline.suffix](one_step(report)))
    for path in (html, timeline):
        if path is not None and not is_json:
            print(f"\nthe timeline, now and after the fix: {path}")


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The trace files named, those of a folder for a folder."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
            if not found:
                raise UsersMistake(f"no traces in {path}", hint="traces are files that end with .json or .json.gz")
            files += found
        else:
            files.append(path)
    return files


def _show(console: Console, report: Report) -> None:
    traced = report.traced
    gpu = traced.traces[0].gpu or "GPU"
    steps = f"{traced.program.num_steps} steps" if traced.program.num_steps > 1 else "one step"
    console.print(
        f"{len(traced.traces)} rank(s) on {escape(gpu)}; {steps}, {report.step_us / 1e3:.3f} ms each; the replay misses them by"
        f" {report.error:.2%}\n"
    )
    console.print(f"[bold]{escape(headline(report))}[/bold]\n")
    real = [diagnosis for diagnosis in report.diagnoses if not diagnosis.is_remark]
    remarks = [diagnosis for diagnosis in report.diagnoses if diagnosis.is_remark]
    for number, diagnosis in enumerate(real, start=1):
        _show_diagnosis(console, number, diagnosis)
    if remarks:
        console.print("remarks, too little or too unsure for a diagnosis:")
        for diagnosis in remarks[:_MOST_REMARKS]:
            console.print(f"  {escape(diagnosis.finding.title)}: {gain_text(diagnosis.gain)}")
        console.print()
    _show_metrics(console, report)
    for text in report.observed:
        console.print(f"of the machine: {escape(text)}", style="dim")
    for text in (*report.unknown, *(note for trace in traced.traces for note in trace.notes)):
        console.print(f"cannot be told: {escape(text)}", style="dim")


def _show_diagnosis(console: Console, number: int, diagnosis: Diagnosis) -> None:
    finding = diagnosis.finding
    console.print(f"[bold]{number}. {escape(finding.title)}[/bold]")
    rows = [
        ("wins", f"{gain_text(diagnosis.gain)} ({diagnosis.confidence})"),
        ("seen", finding.evidence),
        ("where", finding.where),
        ("fix", finding.fix),
    ]
    for name, text in rows:
        console.print(Padding(f"[cyan]{name:5}[/cyan] {escape(text)}", (0, 0, 0, 3)))
    if finding.code:
        console.print(Padding(Syntax(finding.code, "python", background_color="default"), (0, 0, 0, 9)))
    console.print()


def _show_metrics(console: Console, report: Report) -> None:
    figures = ["computes", "communicates", "hidden", "exposed", "waits for peers", "copies alone", "idle", "slowed by"]
    table = new_table("", ["rank"], figures)
    for row in rank_metrics(report.traced):
        times = (
            row.compute_us,
            row.communicate_us,
            row.hidden_us,
            row.exposed_us,
            row.peer_us,
            row.copy_us,
            row.idle_us,
            row.slowed_us,
        )
        table.add_row(row.label, *(share(time / row.total_us) if row.total_us else "-" for time in times))
    console.print(table)
    collectives = collective_metrics(report.traced)
    if collectives:
        table = new_table("", ["collective", "group"], ["times", "ms", "exposed ms", "waits for peers ms"])
        for row_of in collectives[:_MOST_COLLECTIVES]:
            figures_of = (row_of.communicate_us, row_of.exposed_us, row_of.peer_us)
            table.add_row(
                row_of.name[:40], row_of.group, f"{row_of.num:g}", *(f"{time / 1e3:.3f}" for time in figures_of)
            )
        console.print(table)
