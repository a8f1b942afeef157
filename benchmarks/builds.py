"""How long a hop takes in the compiled build: beside the pure one, an earlier commit and Ray, in turns within one run.

Run ``python -m benchmarks.builds REF`` from the root of the repository; REF is a commit, or the folder of another checkout. It
compiles this tree first (a minute, needs a C compiler). ``--rounds`` for more blocks than seven, ``--limit-s`` for a time after
which no round begins, ``--report`` to write the Markdown report. In each round every side runs a block of each measure on fresh
actors; a block that other programs disturbed is run again (`benchmarks.quiet`). Every value is checked. Exits with 1 if the
compiled build missed a target.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import baselines
from benchmarks.against import source_of
from benchmarks.common import Ratio, Series, Table, ratio, this_machine, write_report
from benchmarks.hop_latency import import_us
from benchmarks.hop_measures import ASYNCIO, IDLE, IDLE_AFTER_S, IDLE_WINDOW_S, MEASURES, START_UP, Measure
from benchmarks.quiet import Quiet
from benchmarks.workers import ROOT, Worker, WorkerFailed, cpu_seconds

KEYS = ("hot", "chain2", "chain4", "fan2", "fan4", "inflight", "echo")
TARGETS_US = {"hot": 3.5, "chain4": 18.0, "fan4": 20.0, "inflight": 1e6 / 350_000}
"""What the compiled build has to reach, medians of all blocks."""
RAY_FACTOR = 10.0  # one byte out and back, Ray's time over the compiled build's
COPIES_FACTOR = 1.3  # 1 MB out and back, of its two copies between processes
START_LIMIT_US, IMPORT_LIMIT_US, IDLE_LIMIT_PERCENT = 0.3e6, 0.05e6, 0.3
LIMIT_S = 60.0
NUM_COPIES = 300


@dataclass(frozen=True)
class Side:
    """What is measured: a library, from a source."""

    name: str
    library: str
    source: Path


def compiled_source(folder: Path) -> Path:
    """This tree, compiled into ``folder``."""
    print("compiling", file=sys.stderr)
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(folder)]
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CROSSFADE_COMPILE": "1"}, check=True, stdout=subprocess.DEVNULL
    )
    return folder


class Run:
    """The blocks of all sides."""

    def __init__(self, sides: Sequence[Side], measures: Sequence[Measure], quiet: Quiet) -> None:
        self._sides = sides
        self._measures = measures
        self._quiet = quiet
        self.series: dict[tuple[str, str], Series] = {}  # by side and measure
        self.idle: dict[str, float] = {}  # percent of a core, by side

    def of(self, side: str, key: str) -> Series:
        """The blocks of a measure on one side."""
        return self.series.setdefault((side, key), Series())

    def round(self, number: int) -> None:
        """A block of everything on every side; which side begins changes from round to round."""
        first = number % len(self._sides)
        for side in [*self._sides[first:], *self._sides[:first]]:
            with Worker("benchmarks.hop_worker", side.library, source=side.source) as worker:
                for measure in self._measures:
                    self._block(side, worker, measure)
                if side.library == "crossfade":
                    self._block(side, worker, Measure("start", "", START_UP, 1, 1))
                    self.of(side.name, "import").add([import_us(side.source)])
        self.of("copies", "echo").add(self._quiet.run(lambda: baselines.copies_out_and_back_us(NUM_COPIES)))
        one = self._quiet.run(lambda: baselines.copy_us(baselines.COPIED_BYTES, num_copies=NUM_COPIES))
        self.of("memcpy", "echo").add([2 * each for each in one])

    def _block(self, side: Side, worker: Worker, measure: Measure) -> None:
        num = max(3, round(measure.num * measure.ray_share)) if side.library == "ray" else measure.num

        def block() -> list[float] | WorkerFailed:
            try:
                samples: list[float] = worker.begin({**measure.request, "num": num}, limit_s=LIMIT_S)["samples"]
                worker.finish(limit_s=LIMIT_S)
                return samples
            except WorkerFailed as failure:
                return failure

        got = self._quiet.run(block)
        series = self.of(side.name, measure.key)
        if isinstance(got, WorkerFailed):
            series.fail(f"{side.name}, {measure.title}: {got}")
        else:
            series.add(got)

    def watch_idle(self) -> None:
        """The CPU that an idle graph of four actors takes."""
        for side in self._sides:
            if side.library == "crossfade":
                self.idle[side.name] = self._quiet.run(lambda side=side: _idle_percent(side))  # type: ignore[misc]


def _idle_percent(side: Side) -> float:
    with Worker("benchmarks.hop_worker", side.library, source=side.source) as worker:
        request = {**IDLE, "hold_s": IDLE_AFTER_S + IDLE_WINDOW_S + 1.0}
        pids = worker.begin(request, limit_s=LIMIT_S)["pids"]
        time.sleep(IDLE_AFTER_S)
        processes = worker.processes() | set(pids)
        before, start = cpu_seconds(processes), time.monotonic()
        time.sleep(IDLE_WINDOW_S)
        percent = 100 * (cpu_seconds(processes) - before) / (time.monotonic() - start)
        worker.finish(limit_s=LIMIT_S)
        return percent


def _us(series: Series) -> str:
    summary, spread = series.summary(), series.spread()
    return f"{summary.median:.2f} ({spread[0]:.2f} to {spread[1]:.2f})" if summary and spread else "failed"


def times(run: Run, sides: Sequence[Side], measures: Sequence[Measure]) -> Table:
    """Each measure on each side, and the ratios that matter."""
    columns = ["us (lowest to highest block)", *(side.name for side in sides), "pure / before", "compiled / pure"]
    has_ray = any(side.library == "ray" for side in sides)
    table = Table("hops", [*columns, *(["Ray / compiled"] if has_ray else [])])
    for measure in measures:
        cells = [_us(run.of(side.name, measure.key)) for side in sides]
        pairs = [("pure", "before"), ("compiled", "pure"), *([("ray", "compiled")] if has_ray else [])]
        ratios = [ratio(run.of(over, measure.key), run.of(under, measure.key)) for over, under in pairs]
        table.add(measure.title, *cells, *(str(each or "-") for each in ratios))
    for title, key in (("two memcpys of 1 MB in one process", "memcpy"), ("the same copies between two", "copies")):
        table.add(title, _us(run.of(key, "echo")), *[""] * (len(table.columns) - 2))
    return table


def verdicts(run: Run, has_ray: bool) -> Table:
    """What the compiled build has to reach, and what it did."""
    table = Table("targets", ["", "asked", "seen", "met"])

    def add(title: str, asked: str, seen: float | None, is_met: Callable[[float], bool], more: str = "") -> None:
        table.add(
            title, asked, "failed" if seen is None else f"{seen:.2f}{more}", _yes(seen is not None and is_met(seen))
        )

    def median(key: str) -> float | None:
        summary = run.of("compiled", key).summary()
        return summary.median if summary else None

    titles = {measure.key: measure.title for measure in MEASURES}
    for key, limit_us in TARGETS_US.items():
        add(f"{titles[key]}, us", f"at most {limit_us:.2f}", median(key), limit_us.__ge__)
    if has_ray:
        times_ray = ratio(run.of("ray", "hot"), run.of("compiled", "hot"))
        add("Ray over it, 1 byte out and back", "at least 10", _median(times_ray), lambda seen: seen >= RAY_FACTOR)
    for title, key in (
        ("of two memcpys in one process", "memcpy"),
        ("of the same copies between two processes", "copies"),
    ):
        over = ratio(run.of("compiled", "echo"), run.of(key, "echo"))
        add(f"1 MB out and back, {title}", "at most 1.3", _median(over), lambda seen: seen <= COPIES_FACTOR)
    add(
        "4 actors, a graph, the first result, us",
        "at most 300000",
        median("start"),
        lambda seen: seen <= START_LIMIT_US,
    )
    add("import, us", "at most 50000", median("import"), lambda seen: seen <= IMPORT_LIMIT_US)
    add(
        "idle graph of 4 actors, % of a core",
        "at most 0.3",
        run.idle.get("compiled"),
        lambda seen: seen <= IDLE_LIMIT_PERCENT,
    )
    return table


def _median(seen: Ratio | None) -> float | None:
    return None if seen is None else seen.median


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "NO"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.builds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ref", help="the commit, or the folder of the checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each side")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no round begins later than this")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out")
    parser.add_argument("--only", nargs="+", choices=[*KEYS, ASYNCIO.key], default=KEYS, help="these measures only")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for quiet, in all")
    parser.add_argument("--report", action="store_true", help="write the report into benchmarks/reports/")
    options = parser.parse_args(arguments)
    has_ray = not options.no_ray and importlib.util.find_spec("ray") is not None
    measures = [each for each in (*MEASURES, ASYNCIO) if each.key in options.only]
    measures = [replace(each, num=min(each.num, 20_000)) for each in measures]
    quiet = Quiet(options.patience)
    with tempfile.TemporaryDirectory(prefix="crossfade-compiled-") as folder, source_of(options.ref) as before:
        here = ROOT / "src"
        sides = [Side("before", "crossfade", before), Side("pure", "crossfade", here)]
        sides += [Side("compiled", "crossfade", compiled_source(Path(folder)))]
        for side in sides:  # as an installation has it, also where Python is told to write no bytecode
            compileall.compile_dir(side.source, quiet=1)
        sides += [Side("ray", "ray", here)] if has_ray else []
        run = Run(sides, measures, quiet)
        end_s, num_rounds = time.monotonic() + options.limit_s, 0
        for number in range(options.rounds):
            if time.monotonic() > end_s:
                break
            num_rounds += 1
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            run.round(number)
        run.watch_idle()
    shown = [times(run, sides, measures), verdicts(run, has_ray)]
    for table in shown:
        table.show()
    errors = [f"- {error}" for series in run.series.values() for error in series.errors]
    print(*errors, quiet.summary(), sep="\n")
    if options.report:
        machine = this_machine(("crossfade", "numpy", "ray"))
        title = f"# The compiled build beside the pure one, {options.ref} and Ray"
        head = f"{title}\n\n{machine}\n\n{num_rounds} rounds. {quiet.summary()}"
        text = "\n\n".join([head, *(table.markdown() for table in shown), "\n".join(errors)])
        print(f"wrote {write_report('builds', machine, text.rstrip() + chr(10)).relative_to(ROOT)}")
    return int(any(row[-1] == "NO" for row in shown[1].rows))


if __name__ == "__main__":
    sys.exit(main())
