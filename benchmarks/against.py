"""Is it as quick as before? The measures of `benchmarks.hop_latency`, and collectives, on two sources of crossfade, in turns.

Run ``python -m benchmarks.against REF`` from the root of the repository, where REF is a commit, or the folder of another
checkout: ``--rounds`` for more blocks than seven, ``--only`` for some measures, ``--report NAME`` to write the Markdown report.
Both are measured by this tree, in one run, in pairs of processes, each measure on fresh actors; which source begins changes from
round to round. Exits with 1 if a measure takes over 2 % longer than before, by the median ratio of paired blocks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.common import Series, Table, ratio, this_machine, write_report
from benchmarks.hop_measures import ASYNCIO, COLLECTIVES, MEASURES, Measure
from benchmarks.workers import ROOT, Worker, WorkerFailed

ALL = (*MEASURES, ASYNCIO, *COLLECTIVES)
LIMIT = 1.02
LIMIT_S = 60.0
KEYS = ("hot", "chain2", "chain4", "fan2", "fan4", "echo", "inflight", "asyncio")
"""What is measured unless something else is asked for."""


@contextmanager
def source_of(ref: str) -> Iterator[Path]:
    """The source of a commit, in a folder that is gone afterwards, or that of another checkout."""
    if Path(ref).is_dir():
        yield Path(ref).resolve() / "src"
        return
    with tempfile.TemporaryDirectory(prefix="crossfade-against-") as folder:
        packed = subprocess.run(["git", "archive", ref, "src"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        yield Path(folder) / "src"


def block(worker: Worker, measure: Measure, num: int) -> list[float]:
    """The samples of one block, in microseconds."""
    samples: list[float] = worker.begin({**measure.request, "num": num}, limit_s=LIMIT_S)["samples"]
    worker.finish(limit_s=LIMIT_S)
    return samples


def measured(
    sources: Sequence[Path], measures: Sequence[Measure], num_rounds: int, *, quick: bool
) -> list[list[Series]]:
    """For each measure, the blocks of each source."""
    results = [[Series() for _ in sources] for _ in measures]
    for number in range(num_rounds):
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
        with ExitStack() as stack:
            workers = [
                stack.enter_context(Worker("benchmarks.hop_worker", "crossfade", source=source)) for source in sources
            ]
            for measure, series in zip(measures, results, strict=True):
                sides = list(zip(workers, series, strict=True))
                for worker, side in sides if number % 2 == 0 else sides[::-1]:
                    try:
                        side.add(block(worker, measure, measure.num_quick if quick else measure.num))
                    except WorkerFailed as failure:
                        side.fail(str(failure))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the report."""
    parser = argparse.ArgumentParser(prog="benchmarks.against", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ref", help="the commit, or the folder of the checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each source")
    parser.add_argument("--quick", action="store_true", help="short blocks: a smoke run")
    parser.add_argument(
        "--only", nargs="+", choices=[each.key for each in ALL], default=KEYS, help="these measures only"
    )
    parser.add_argument("--report", metavar="NAME", help="write the report NAME into benchmarks/reports/")
    options = parser.parse_args(arguments)
    measures = [each for each in ALL if each.key in options.only]
    with source_of(options.ref) as before:
        results = measured([before, ROOT / "src"], measures, options.rounds, quick=options.quick)
    return show(measures, results, options)


def show(measures: Sequence[Measure], results: Sequence[Sequence[Series]], options: argparse.Namespace) -> int:
    """Prints the figures, and writes them down if that is asked for; 1 if a measure failed or takes longer."""
    table = Table(f"now, and at {options.ref}, us", ["", "before", "now", "now / before (blocks)"])
    is_slower = False
    for measure, (before, now) in zip(measures, results, strict=True):
        summaries, slower = [before.summary(), now.summary()], ratio(now, before)
        table.add(
            measure.title, *(f"{each.median:.2f}" if each else "failed" for each in summaries), str(slower or "failed")
        )
        is_slower |= slower is None or slower.median > LIMIT
        for error in (*before.errors, *now.errors):
            print(f"! {measure.title}: {error}")
    table.show()
    if options.report:
        machine = this_machine(("crossfade", "numpy"))
        path = write_report(options.report, machine, f"# Now and at {options.ref}\n\n{machine}\n\n{table.markdown()}\n")
        print(f"wrote {path.relative_to(ROOT)}")
    return int(is_slower)


if __name__ == "__main__":
    sys.exit(main())
