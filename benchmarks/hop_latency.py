"""How long a hop takes: crossfade beside Ray Compiled Graph, in alternating rounds within one run.

Run ``python -m benchmarks.hop_latency`` from the root of the repository: ``--quick`` for a smoke run, ``--report`` to
write the Markdown report, ``--rounds`` for more blocks. In each round one side runs a block of every measure, then the
other; Ray's daemons are stopped while crossfade runs. Every block runs on fresh actors in a worker process, every
value is checked, and a block that does not end in time is ended and reported. Where Ray is not installed, it is left
out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import baselines
from benchmarks.common import this_machine, write_report
from benchmarks.hop_measures import BLOCKING, IDLE, IDLE_AFTER_S, IDLE_WINDOW_S, MEASURES, START_UP, Measure
from benchmarks.hop_report import Results, markdown, tables
from benchmarks.workers import ROOT, Worker, WorkerFailed, cpu_seconds, environment

LIMIT_S = 60.0
NUM_IMPORTS = 5
NUM_START_UPS = 3
MAX_FAILED_STARTS = 2


@dataclass
class Side:
    """One library and the worker that runs it, started again after it had to be ended.

    Attributes:
        name: as `benchmarks.hop_worker` calls it.
        init_us: how long each start of a worker took from its first import to the end of ``init``.
        incidents: what went wrong, in words.
    """

    name: str
    init_us: list[float] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    _worker: Worker | None = None
    _num_failed_starts: int = 0

    def worker(self) -> Worker:
        """The live worker."""
        if self._worker is None or not self._worker.is_alive:
            self.close()
            if self._num_failed_starts == MAX_FAILED_STARTS:
                raise WorkerFailed(f"it was given up after {MAX_FAILED_STARTS} starts that failed")
            self._num_failed_starts += 1
            self._worker = Worker("benchmarks.hop_worker", self.name)
            self._num_failed_starts = 0
            self.init_us.append(self._worker.init_us)
        return self._worker

    def ask(
        self, request: Mapping[str, Any], meanwhile: Callable[[Worker, Any], Any] | None = None
    ) -> dict[str, Any] | None:
        """One block; None when it gave no result. ``meanwhile`` is called while the graph is still there."""
        result: dict[str, Any] | None = None
        try:
            worker = self.worker()
            result = worker.begin(request, limit_s=LIMIT_S)
            if meanwhile is not None:
                result["meanwhile"] = meanwhile(worker, result)
            worker.finish(limit_s=LIMIT_S)
        except WorkerFailed as failure:
            when = "while it ran" if result is None else "while it was torn down"
            self.incidents.append(f"{self.name}, {request['measure']}, {when}: {failure}")
        return result

    def incidents_in_short(self) -> list[str]:
        """Each incident once, with how often it happened."""
        return [text if num == 1 else f"{text} ({num} times)" for text, num in Counter(self.incidents).items()]

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class Run:
    """One run of the benchmark: two or three sides and the baselines, in alternating blocks."""

    def __init__(self, *, quick: bool, num_rounds: int, with_ray: bool, measures: Sequence[Measure]) -> None:
        self._quick = quick
        self._num_rounds = num_rounds
        self._measures = measures
        self._console = Console(stderr=True)
        self.crossfade = Side("crossfade")
        self.blocking = Side("blocking")
        self.ray = Side("ray") if with_ray else None
        self.results = Results()

    @property
    def sides(self) -> list[Side]:
        """Both libraries, or only crossfade."""
        return [self.crossfade, self.ray] if self.ray else [self.crossfade]

    def go(self) -> Results:
        """Measures everything."""
        try:
            with tempfile.TemporaryDirectory(prefix="crossfade-bench-") as folder:
                futex = baselines.build_futex_pingpong(Path(folder))
                for number in range(self._num_rounds):
                    self._round(number, futex)
            self._idle()
            self._start_up()
        finally:
            for side in (*self.sides, self.blocking):
                side.close()
                self.results.incidents += side.incidents_in_short()
        self.results.import_us = [import_us() for _ in range(NUM_IMPORTS)]
        for side in self.sides:
            self.results.init_us[side.name] = side.init_us
        return self.results

    def _round(self, number: int, futex: Path | None) -> None:
        self._console.print(f"round {number + 1} of {self._num_rounds}", style="dim")
        num = 500 if self._quick else 5_000
        self._baseline("spin", lambda: baselines.spin_round_trips_us(10 * num))
        for side in self.sides if number % 2 == 0 else self.sides[::-1]:
            for measure in self._measures:
                self._block(side, measure)
            if side is self.ray:
                side.close()  # its daemons would share the cores with the other side's blocks
        if futex is not None:
            self._baseline("futex", lambda: baselines.futex_round_trips_us(futex, num, apart=False))
            self._baseline("futex apart", lambda: baselines.futex_round_trips_us(futex, num, apart=True))
        self._block(self.blocking, BLOCKING)

    def _baseline(self, name: str, run: Callable[[], list[float]]) -> None:
        series = self.results.series(name, name)
        try:
            series.add(run())
        except (subprocess.SubprocessError, OSError) as error:
            series.fail(str(error))
            self.results.incidents.append(f"baseline {name}: {error}")

    def _block(self, side: Side, measure: Measure) -> None:
        num = measure.num_quick if self._quick else measure.num
        if side is self.ray:
            num = max(3, round(num * measure.ray_share))
        result = side.ask({**measure.request, "num": num})
        series = self.results.series(side.name, measure.key)
        if result is None:
            series.fail(side.incidents[-1])
            return
        series.add(result["samples"])
        if "copy_us" in result:
            self.results.series(side.name, f"{measure.key} copy").add(result["copy_us"])
            self.results.series(side.name, f"{measure.key} first").add([result["first_us"]])

    def _idle(self) -> None:
        window_s = 2.0 if self._quick else IDLE_WINDOW_S
        request = {**IDLE, "hold_s": IDLE_AFTER_S + window_s + 1.0}

        def watch(worker: Worker, result: Mapping[str, Any]) -> tuple[float, int]:
            time.sleep(IDLE_AFTER_S)
            processes = worker.processes() | set(result["pids"])
            before, start = cpu_seconds(processes), time.monotonic()
            time.sleep(window_s)
            return 100 * (cpu_seconds(processes) - before) / (time.monotonic() - start), len(processes)

        for side in self.sides:
            result = side.ask(request, watch)
            if result is not None:
                self.results.idle[side.name] = result["meanwhile"]

    def _start_up(self) -> None:
        for _ in range(1 if self._quick else NUM_START_UPS):
            for side in self.sides:
                side.close()
                result = side.ask(START_UP)
                if result is not None:
                    self.results.series(side.name, "start compile").add([result["compiled_us"]])
                    self.results.series(side.name, "start first").add(result["samples"])


def import_us(source: Path = ROOT / "src") -> float:
    """``import crossfade`` in a fresh interpreter, which must leave torch and numpy alone."""
    code = (
        "import sys, time; start = time.perf_counter_ns(); import crossfade; taken = time.perf_counter_ns() - start; "
        "sys.exit('import crossfade imports torch') if 'torch' in sys.modules else print(taken / 1_000)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=environment(source=source)
    )
    return float(done.stdout)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.hop_latency", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short block of everything: a smoke run")
    parser.add_argument("--report", action="store_true", help="write the report into benchmarks/reports/")
    parser.add_argument("--rounds", type=int, default=None, help="blocks of each side (default: 5, quick: 1)")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out")
    keys = [measure.key for measure in MEASURES]
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, help="these measures only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the report; 1 when crossfade missed a target."""
    options = parse_arguments(arguments)
    with_ray = not options.no_ray and importlib.util.find_spec("ray") is not None
    run = Run(
        quick=options.quick,
        num_rounds=options.rounds or (1 if options.quick else 5),
        with_ray=with_ray,
        measures=[measure for measure in MEASURES if measure.key in options.only],
    )
    load = os.getloadavg()[0]
    results = run.go()
    machine = this_machine(("crossfade", "numpy", "torch", "ray"))
    shown = tables(results)
    for table in shown:
        table.show()
    for incident in results.incidents:
        print(f"! {incident}")
    if options.report:
        path = write_report("hop_latency", machine, markdown(results, shown, machine, sys.argv[1:], load))
        print(f"wrote {path.relative_to(ROOT)}")
    return 0 if all(results.verdicts()) else 1


if __name__ == "__main__":
    sys.exit(main())
