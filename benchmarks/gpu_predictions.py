"""How well the cost model predicts graphs on GPUs that it has not seen.

Run ``python -m benchmarks.gpu_predictions`` from the root of the repository: ``--report``, ``--quick`` as for
``benchmarks.gpu_overlap``. First ``crossfade topology`` measures the links between the GPUs, and `crossfade.calibrate` what the
host's steps cost; ``--topology`` takes a file that was measured before. Then every method is timed alone on an idle GPU, its
kernels on the device's clock and what the host takes to enqueue them, and five graphs of four actors are predicted; only
afterwards are they measured, in turn. No figure is fitted to them. Each result is compared with what indexing gives on the CPU.
What is wanted is wanted of four GPUs; where there are two or three, two actors share each.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Table
from benchmarks.gpu_cases import CASES, NUM_ACTORS
from benchmarks.gpu_steps import Book, Side, parser_of, publish, spread_of
from benchmarks.workers import ROOT, environment

MEDIAN_LIMIT, WORST_LIMIT = 0.10, 0.20
TOPOLOGY_LIMIT_S = 150.0
LIMIT_S = 90.0


def measure_topology(book: Book, path: Path) -> bool:
    """Runs the command; whether it wrote its file."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "crossfade", "topology", "--json", str(path)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TOPOLOGY_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        book.add("topology", "crossfade", {"failed": f"not done within {TOPOLOGY_LIMIT_S:g} s"})
        return False
    if done.returncode:
        book.add("topology", "crossfade", {"failed": (done.stderr or done.stdout).strip()[-300:]})
        return False
    book.add("topology", "crossfade", {"taken_s": time.monotonic() - begin})
    return True


def measure(book: Book, options: argparse.Namespace, device: str) -> None:
    """Calibrates, predicts everything, then measures everything."""
    topology = options.topology
    if device == "cuda" and topology is None:
        topology = Path(options.out).resolve() / "topology.json"
        if not measure_topology(book, topology):
            return
    side = Side("crossfade", "benchmarks.gpu_cases", (device, options.transport, str(options.size)))
    try:
        request = {"measure": "calibrate", "topology": str(topology.resolve()) if topology else ""}
        if side.ask(book, "calibrate", request, limit_s=LIMIT_S) is None:
            return
        for index, case in enumerate(CASES):
            side.ask(book, f"predict {case.name}", {"measure": "predict", "case": index}, limit_s=LIMIT_S)
        for number in range(options.rounds):
            cases = list(enumerate(CASES))
            for index, case in cases if number % 2 == 0 else cases[::-1]:
                side.ask(book, f"measure {case.name}", {"measure": "measure", "case": index}, limit_s=LIMIT_S)
    finally:
        side.close()


def tables_of(book: Book) -> tuple[list[Table], list[float]]:
    """The tables, and the errors, as shares."""
    table = Table("Predicted and measured, ms", ["graph", "predicted", "measured (lowest and highest block)", "error"])
    methods = Table("Methods alone, ms", ["graph", "methods"])
    errors = []
    for case in CASES:
        predicted, blocks = (
            book.of(f"predict {case.name}", "crossfade"),
            book.blocks(f"measure {case.name}", "crossfade"),
        )
        if not predicted or not blocks:
            continue
        predicted_us = predicted[-1]["predicted_us"]
        measured_us = statistics.median(value for block in blocks for value in block)
        errors.append(predicted_us / measured_us - 1)
        table.add(case.name, f"{predicted_us / 1e3:.3f}", spread_of(blocks, 1e-3, 3), f"{errors[-1]:+.1%}")
        times = predicted[-1]["methods_us"].items()
        methods.add(case.name, ", ".join(f"{name} {time_us / 1e3:.3f}" for name, time_us in times))
    return [table, methods], errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints: 2 when a value was wrong, 1 when the errors are larger than is wanted here or a step failed."""
    parser = parser_of("gpu_predictions", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each graph")
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of a tensor")
    parser.add_argument("--topology", type=Path, help="a file of crossfade topology; measured now without it")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    device = "cuda" if 2 * num_gpus >= NUM_ACTORS else "cpu"
    if options.quick:
        options.rounds = 2
    if device == "cpu":
        options.size = min(options.size, 128)
    book = Book(Path(options.out) / "gpu_predictions.jsonl")
    measure(book, options, device)
    tables, errors = tables_of(book)
    sizes = sorted(abs(error) for error in errors)
    summary = f"Median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}" if sizes else "Nothing was measured"
    text = (
        f"{__doc__}\n{options.size} x {options.size} fp16 on {device}. {summary} (at most {MEDIAN_LIMIT:.0%} and "
        f"{WORST_LIMIT:.0%} wanted)."
    )
    publish("gpu_predictions", "Predictions of graphs on GPUs", book, options, tables, text)
    if book.has_wrong_value:
        return 2
    is_met = len(sizes) == len(CASES) and statistics.median(sizes) <= MEDIAN_LIMIT and sizes[-1] <= WORST_LIMIT
    return 1 if book.failures() or (num_gpus >= NUM_ACTORS and not is_met) else 0


if __name__ == "__main__":
    sys.exit(main())
