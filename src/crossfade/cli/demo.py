"""``crossfade demo``: the fan-in program, run, measured and drawn."""

from __future__ import annotations

import errno
import os
import platform
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from rich.console import Console

import crossfade
from crossfade.api import CompiledGraph
from crossfade.cli.exits import told
from crossfade.cli.fan_in import NUM_IN_BURST, ON_CPU, FanIn, Measured, Parts, measure
from crossfade.cli.measure import alone_us, median, p99, show_us
from crossfade.cli.shown import new_table
from crossfade.engines.machine import num_visible_gpus
from crossfade.plan.picture import draw_timelines
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Timeline

REWRITTEN = ("plan.txt", "timeline.svg", "overlap.svg")
REPLACED = ("predicted.json", "measured.json")
"""The files: written where they are, and replaced by new ones."""

_OTHER_FOLDER = "name another folder with --output"

NUM_BURSTS = 10
NUM_ROUND_TRIPS = 2000
NUM_GLOO_BURSTS = 8


def run_demo(output: Path, engine: str) -> None:
    """Runs the program, prints what it took, and writes the plan, the picture and the traces."""
    console = Console(highlight=False)
    _make_folder(output)
    parts = _gpu_parts() if engine == "local" else None
    _print_head(console, engine, parts or ON_CPU)
    start_s = time.perf_counter()
    crossfade.init(engine=engine)
    program = FanIn(parts or ON_CPU)
    with program.compile() as graph:
        console.print(f"Actors started and graph compiled in {time.perf_counter() - start_s:.2f} s.\n")
        console.print("[bold]The plan[/]: what each does in one execution, from left to right")
        console.print(fold_grid(graph.plan, console.width), markup=False, soft_wrap=True)
        measured = _measure(console, program, graph)
        num_copied = None if parts else _num_copied(graph)
    _print_times(console, measured, _round_trips_us(program))
    _print_shares(console, measured)
    _print_prediction(console, measured)
    if num_copied is not None:
        console.print(
            "Through shared memory nothing is copied on the way: a sender writes its array into a slot once, and the receiver "
            f"works on that very slot ({num_copied} arrays were copied out). So there is no transfer to hide, and overlap "
            "changes nothing here."
        )
    files = _write_files(output, measured)
    files += _show_overlap(console, program, output, engine)
    console.print("\n[bold]Files[/]")
    for path, what in files:
        console.print(f"  {path}  {what}", soft_wrap=True)


def _gpu_parts() -> Parts | None:
    """The program on GPUs, if there are two or more and torch can use them."""
    if num_visible_gpus() < 2 or find_spec("torch") is None or find_spec("cuda") is None:
        return None
    import torch

    from crossfade.cli.gpu_actors import on_gpus

    num_gpus = min(num_visible_gpus(), torch.cuda.device_count())
    return on_gpus(num_gpus) if num_gpus >= 2 else None


def fold_grid(plan: Plan, width: int) -> str:
    """The grid of a plan's text, in as many pieces one below the other as it takes for lines of ``width`` letters."""
    lines = str(plan).splitlines()
    rows = [line.split(" | ") for line in lines[-len(plan.programs) :]]
    num_columns = max(map(len, rows))
    widths = [max(len(row[column].rstrip()) for row in rows if column < len(row)) for column in range(num_columns)]
    pieces: list[list[int]] = [[]]
    for column in range(1, num_columns):
        if pieces[-1] and widths[0] + sum(widths[each] + 3 for each in (*pieces[-1], column)) > width:
            pieces.append([])
        pieces[-1].append(column)
    return "\n\n".join("\n".join(_piece(row, widths, piece) for row in rows) for piece in pieces)


def _piece(row: Sequence[str], widths: Sequence[int], columns: Sequence[int]) -> str:
    cells = [row[column].rstrip().ljust(widths[column]) if column < len(row) else "" for column in (0, *columns)]
    return " | ".join(cells).rstrip(" |")


def _make_folder(output: Path) -> None:
    with told(f"cannot write into {output}", hint=_OTHER_FOLDER):
        output.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=output):
            pass
    for name in (*REWRITTEN, *REPLACED):
        _probe(output / name)


def _probe(path: Path) -> None:
    """Tells now, not after all was measured, that a file cannot be written."""
    with told(f"cannot write {path}", hint=_OTHER_FOLDER):
        if path.name in REPLACED:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif os.path.lexists(path):
            path.open("ab").close()


def _print_head(console: Console, engine: str, parts: Parts) -> None:
    console.print(f"[bold]crossfade {crossfade.__version__}[/], engine {engine}, {os.cpu_count()} cores, ", end="")
    console.print(f"Python {platform.python_version()}, numpy {np.__version__}")
    what, where = ("a tensor", ", each actor on a GPU of its own") if parts.num_gpus else ("an array", "")
    senders = f"{parts.num_senders} senders make" if parts.num_senders > 1 else "1 sender makes"
    console.print(
        f"{senders} {what} of {parts.value_bytes / 1e6:.4g} MB each, a receiver works on each, the driver gets the "
        f"results{where}.",
        soft_wrap=True,
    )


def _measure(console: Console, program: FanIn, graph: CompiledGraph) -> Measured:
    with console.status("running"):
        measured = measure(program, [graph], NUM_BURSTS)[0]
    num = len(measured.bursts) * NUM_IN_BURST
    console.print(f"\n{num} executions in bursts of {NUM_IN_BURST}; each result equals a plain computation's.")
    return measured


def _num_copied(graph: CompiledGraph) -> int:
    """Arrays that the receiver copied out of their slots."""
    ends = graph.statistics().actors["Receiver"].channels
    return sum(counters["num_copied_out"] for counters in ends.values())


def _round_trips_us(program: FanIn) -> list[float]:
    with crossfade.InputNode() as value:
        node = program.receiver.echo.bind(value)
    with node.compile() as graph:
        inputs = [bytes([number % 251]) for number in range(NUM_ROUND_TRIPS)]
        alone_us(graph, inputs[:200], bytes.__eq__)
        return alone_us(graph, inputs, bytes.__eq__)


def _print_times(console: Console, measured: Measured, round_trips_us: Sequence[float]) -> None:
    table = new_table("", ("what",), ("median us", "p99 us", "MB/s"))
    first, last = measured.plan.nodes[0], measured.plan.nodes[-1]
    writes_us = measured.took_us(f"write {first.outputs[0]}")
    parts, size_mb = measured.parts, measured.parts.value_bytes / 1e6
    what = "tensor" if parts.num_gpus else "array"
    rows = [
        ("one more execution, others in flight", measured.execution_us(), parts.num_senders * size_mb),
        (f"  {first.method}: a sender makes its {what}", measured.took_us(f"run {first.id}"), 0),
        (f"  {'a' if parts.num_gpus else 'an'} {what} of {size_mb:.4g} MB into its slot", writes_us, size_mb),
        (f"  {last.method}: the receiver works on one", measured.took_us(f"run {last.id}"), 0),
        ("1 byte, driver to actor and back", round_trips_us, 0),
        ("  per hop", [time_us / 2 for time_us in round_trips_us], 0),
    ]
    for label, times_us, moved_mb in rows:
        rate = f"{moved_mb / median(times_us) * 1e6:,.0f}" if moved_mb else ""
        table.add_row(label, show_us(median(times_us)), show_us(p99(times_us)), rate)
    console.print(table)


def _print_shares(console: Console, measured: Measured) -> None:
    headings = ("busy", "computes", "exposed comm.", "hidden comm.", "waits")
    table = new_table("Shares of the time, from the measured timeline", ("who",), headings)
    for actor, shares in measured.shares().items():
        figures = (shares.compute + shares.exposed, shares.compute, shares.exposed, shares.hidden, shares.wait)
        table.add_row(actor, *(f"{figure:.1%}" for figure in figures))
    console.print(table)


def _print_prediction(console: Console, measured: Measured) -> None:
    predicted_us, typical_us = measured.predicted().makespan_us, measured.typical().length_us
    console.print(
        f"A burst of {NUM_IN_BURST}: predicted {predicted_us / 1e3:.1f} ms, measured {typical_us / 1e3:.1f} ms (median). The "
        "prediction knows how long methods and writes of arrays took in this very run (their medians); when what runs, and who "
        "waits for whom, is the simulator's."
    )


def _write_files(output: Path, measured: Measured) -> list[tuple[Path, str]]:
    predicted, typical = measured.predicted(), measured.typical().timeline
    (output / "plan.txt").write_text(f"{measured.plan}\n", encoding="utf-8")
    title = f"Fan-in {'between GPUs' if measured.parts.num_gpus else 'through shared memory'}: predicted, measured"
    (output / "timeline.svg").write_text(draw_timelines([predicted, typical], title), encoding="utf-8")
    predicted.save(output / "predicted.json")
    typical.save(output / "measured.json")
    return [
        (output / "timeline.svg", "predicted above measured: the burst of median length"),
        (output / "predicted.json", "the same for https://ui.perfetto.dev"),
        (output / "measured.json", "the same for https://ui.perfetto.dev"),
        (output / "plan.txt", "the whole plan"),
    ]


def _show_overlap(console: Console, program: FanIn, output: Path, engine: str) -> list[tuple[Path, str]]:
    """Runs the program over edges on which a transfer takes time that can be hidden; says what is missing if it cannot."""
    if engine != "local":
        console.print("With --engine local, and torch installed, the same program over gloo edges shows overlap.")
        return []
    if find_spec("torch") is None:
        console.print(
            "With torch installed, the same program over gloo edges shows overlap: pip install 'crossfade[torch]'",
            markup=False,
        )
        return []
    transport = program.parts.overlap_transport
    with (
        console.status(f"the same program over {_edges(program.parts)}, without and with overlap"),
        program.compile(transport=transport, overlap=False) as plain,
        program.compile(transport=transport, overlap=True) as overlapped,
    ):
        without, with_it = measure(program, [plain, overlapped], NUM_GLOO_BURSTS)
    _print_gain(console, without, with_it)
    timelines = [_named(without, "without overlap"), _named(with_it, "with overlap")]
    path = output / "overlap.svg"
    path.write_text(draw_timelines(timelines, f"Fan-in over {_edges(program.parts)}, measured"), encoding="utf-8")
    return [(path, f"over {_edges(program.parts)}: without overlap above with overlap, bursts of median length")]


def _edges(parts: Parts) -> str:
    return "edges between GPUs" if parts.num_gpus else "gloo edges"


def _named(measured: Measured, name: str) -> Timeline:
    return Timeline(name, measured.typical().timeline.spans)


def _print_gain(console: Console, without: Measured, with_it: Measured) -> None:
    """What overlap gained. The share of time saved is the median over bursts that ran one after the other."""
    title = f"The same program over {_edges(without.parts)}, which copy in the background"
    table = new_table(title, ("",), ("ms per execution", "receiver's comm. exposed", "hidden"))
    for name, measured in (("without overlap", without), ("with overlap", with_it)):
        shares = measured.shares()["Receiver"]
        per_execution_ms = median(burst.length_us for burst in measured.bursts) / NUM_IN_BURST / 1e3
        table.add_row(name, f"{per_execution_ms:.2f}", f"{shares.exposed:.1%}", f"{shares.hidden:.1%}")
    console.print()
    console.print(table)
    pairs = zip(without.bursts, with_it.bursts, strict=True)
    gain = 1 - median(after.length_us / before.length_us for before, after in pairs)
    share = f"{abs(gain):.0%}"
    takes = "as long" if share == "0%" else f"{share} {'less' if gain > 0 else 'more'} time"
    console.print(f"With overlap an execution takes {takes} (median of {NUM_GLOO_BURSTS} pairs of bursts in turn).")
    if gain < 0 and share != "0%":
        console.print("There may be other work on this machine, which takes the cores that overlap would use.")
