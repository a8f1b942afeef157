"""Large graphs: how long planning and predicting takes, and how far predictions are from what was measured on sizes that run here.

Run ``python -m benchmarks.plan_predictions`` from the root of the repository: ``--quick`` for a smoke run, ``--report`` to write
the Markdown report, ``--rounds`` for more executions. Predictions know two things of the machine: `crossfade.calibrate`, and the
times of the methods, which a recorded run of a pipeline of two stages and four microbatches gives (`Workload.measured`). No figure
is fitted to the graphs that are predicted.

A stage sleeps or computes. Actors that sleep take no core, as those that wait for a GPU do, so they stand for a machine with a core
for each; those that compute are two, as many as there are cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import crossfade
from benchmarks.common import Table, this_machine, today, write_report
from benchmarks.large_graphs import Stage, pipeline, training_pipeline
from benchmarks.quiet import Quiet
from crossfade.api.calibrate import calibrate
from crossfade.schedule.cost import CostModel
from crossfade.schedule.workload import Workload

FORWARD_US, BACKWARD_US = 3_000.0, 5_000.0
ARRAY_BYTES = 1_000_000
LIMIT_PERCENT = 10
LIMIT_S = 30
SIZES = [(64, 64), (128, 64), (256, 64), (512, 64)]
PLANNED = [
    ("pipeline", "CPUs"),
    ("training pipeline", "CPUs"),
    ("training pipeline", "GPUs"),
    ("data parallel", "GPUs"),
    ("fan-out", "CPUs"),
]
SMALL = (2, 4)


class Sleeper(Stage):
    """Sleeps, and passes on what it was given."""

    def forward(self, x: Any, *_: Any) -> Any:
        time.sleep(FORWARD_US / 1e6)
        return x

    def backward(self, x: Any, *_: Any) -> Any:
        time.sleep(BACKWARD_US / 1e6)
        return x


class Computer(Stage):
    """Computes, and passes on what it was given."""

    def forward(self, x: Any, *_: Any) -> Any:
        _compute(80_000)
        return x

    def backward(self, x: Any, *_: Any) -> Any:
        _compute(130_000)
        return x


def _compute(num: int) -> float:
    total = 0.0
    for number in range(num):
        total += number * 0.5
    return total


@dataclass
class Case:
    """A graph that runs here."""

    name: str
    kind: type[Stage]
    make: Any
    num_stages: int
    num_microbatches: int
    value_bytes: int = 8
    engine: str = "local"
    samples_us: list[float] = field(default_factory=list)
    predicted_us: float = 0.0

    def argument(self) -> Any:
        return 1.0 if self.value_bytes < 1_000 else np.zeros(self.value_bytes // 8)

    def compiled(self, shape: tuple[int, int], *, record: bool) -> Any:
        return self.make(*shape, self.kind).compile(max_inflight=1, record=record)

    def workload(self) -> Workload:
        """From the small pipeline."""
        with self.compiled(SMALL, record=True) as graph:
            for _ in range(6):
                self.run(graph)
            times = Workload.measured(graph.timeline())
        return replace(times, default_value_bytes=self.value_bytes)

    def run(self, graph: Any) -> float:
        argument = self.argument()
        start_ns = time.perf_counter_ns()
        results = crossfade.get(graph.execute(argument))
        taken_us = (time.perf_counter_ns() - start_ns) / 1e3
        if not all(np.array_equal(result, argument) for result in results):
            raise SystemExit(f"{self.name}: a wrong value")
        return taken_us

    def measure(self, costs: CostModel, num_rounds: int, quiet: Quiet) -> None:
        """In a session of its own: first what the prediction knows, then the prediction, then the graph itself."""
        crossfade.init(engine=self.engine)
        try:
            workload = quiet.run(self.workload)
            if self.kind is Sleeper:
                costs = replace(costs, num_cores=2 * (self.num_stages + 1))
            with self.compiled((self.num_stages, self.num_microbatches), record=False) as graph:
                self.predicted_us = graph.predicted_timeline(workload, costs).makespan_us
                self.run(graph)
                self.samples_us += [quiet.run(lambda: self.run(graph)) for _ in range(num_rounds)]
        finally:
            crossfade.shutdown()

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted_us / statistics.median(self.samples_us) - 1)

    def cells(self) -> tuple[str, ...]:
        measured, low, high = statistics.median(self.samples_us), min(self.samples_us), max(self.samples_us)
        shown = f"{measured / 1e3:.1f} ({low / 1e3:.1f} to {high / 1e3:.1f})"
        return (
            self.name,
            f"{self.predicted_us / 1e3:.1f}",
            shown,
            f"{self.error_percent:+.1f} %",
            str(len(self.samples_us)),
        )


def cases() -> list[Case]:
    found = [
        Case(f"forward, {stages} x {microbatches}, sleeping", Sleeper, pipeline, stages, microbatches)
        for stages, microbatches in ((2, 8), (4, 16), (8, 64))
    ]
    found += [
        Case(f"training, {stages} x {microbatches}, sleeping", Sleeper, training_pipeline, stages, microbatches)
        for stages, microbatches in ((2, 16), (4, 32), (8, 64))
    ]
    found += [
        Case("forward, 4 x 32, sleeping, 1 MB values", Sleeper, pipeline, 4, 32, ARRAY_BYTES),
        Case("forward, 2 x 16, computing", Computer, pipeline, 2, 16),
        Case("forward, 2 x 64, computing", Computer, pipeline, 2, 64),
        Case("training, 2 x 16, computing", Computer, training_pipeline, 2, 16),
        Case("training, 2 x 64, computing", Computer, training_pipeline, 2, 64),
    ]
    return found


# Planning


@dataclass(frozen=True)
class Planned:
    """What one run of `crossfade.cli` took for a graph of a size, in seconds, and how many actions it has."""

    graph: str
    shape: tuple[int, int]
    on: str
    whole_s: float
    num_actions: int
    memory_mb: float

    def cells(self) -> tuple[str, ...]:
        each_us = self.whole_s * 1e6 / self.num_actions
        actors, times = self.shape
        figures = (f"{self.num_actions:,}", f"{self.whole_s:.1f}", f"{each_us:.0f}", f"{self.memory_mb:,.0f}")
        return self.graph, self.on, f"{actors} x {times}", *figures


def plan_in_a_process(graph: str, shape: tuple[int, int], on: str) -> Planned:
    """Everything from the import to the printed report, in a process of its own, as a user's command has it."""
    environment = {**os.environ, "PLANNED": f"{graph}|{shape[0]}|{shape[1]}|{on}"}
    start_s = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.plan_target"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    whole_s = time.monotonic() - start_s
    num_actions, memory_kb = map(int, done.stdout.splitlines()[-1].split())
    print(f"{graph} on {on}, {shape[0]} x {shape[1]}: {whole_s:.1f} s, {num_actions:,} actions", file=sys.stderr)
    return Planned(graph, shape, on, whole_s, num_actions, memory_kb / 1024)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.plan_predictions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small graphs, once: a smoke run")
    parser.add_argument("--report", action="store_true", help="write the report into benchmarks/reports/")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait, in all, for a quiet machine")
    parser.add_argument("--rounds", type=int, default=10, help="executions of each graph")
    parser.add_argument("--part", choices=("both", "planning", "predictions"), default="both", help="what to do")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans, measures, prints; 1 when it takes too long or a prediction is too far off."""
    options = parse_arguments(arguments)
    quiet = Quiet(0 if options.quick else options.patience)
    tables, verdicts, is_right = [], [], True
    if options.part != "predictions":
        sizes = [(16, 8)] if options.quick else SIZES
        planned = [plan_in_a_process(graph, shape, on) for graph, on in PLANNED for shape in sizes]
        largest = max(each.whole_s for each in planned if each.shape == sizes[-1])
        is_right &= largest < LIMIT_S
        table = Table(
            "Planned, checked, predicted and reported",
            ["graph", "actors", "size", "actions", "seconds", "us an action", "peak MB"],
        )
        for each in planned:
            table.add(*each.cells())
        tables.append(table)
        verdicts.append(
            f"The slowest of {sizes[-1][0]} actors x {sizes[-1][1]} took {largest:.1f} s (under {LIMIT_S} wanted)."
        )
    if options.part != "planning":
        chosen = cases()[:1] if options.quick else cases()
        costs = quiet.run(calibrate)
        table = Table("Predicted and measured", ["graph", "predicted, ms", "measured, ms (range)", "error", "samples"])
        for case in chosen:
            case.measure(costs, 2 if options.quick else options.rounds, quiet)
            table.add(*case.cells())
        worst = max(abs(case.error_percent) for case in chosen)
        is_right &= worst <= LIMIT_PERCENT
        tables.append(table)
        verdicts.append(
            f"The worst of {len(chosen)} predictions was {worst:.1f} % off (at most {LIMIT_PERCENT} wanted). {quiet.summary()}"
        )
    for shown in tables:
        shown.show()
    print(*verdicts, sep="\n")
    if options.report:
        machine = this_machine(("crossfade", "numpy"))
        command = " ".join(
            ["python -m benchmarks.plan_predictions", *(sys.argv[1:] if arguments is None else arguments)]
        )
        head = f"# Large graphs, planned and predicted\n\n{machine}; {today()}; `{command}`\n\n"
        text = head + "\n".join(verdicts) + "\n\n" + (__doc__ or "").split("\n\n", 1)[1].strip() + "\n\n"
        name = "plan_scaling" if options.part == "planning" else "plan_predictions"
        path = write_report(name, machine, text + "\n\n".join(each.markdown() for each in tables) + "\n")
        print(f"wrote {path.name}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
