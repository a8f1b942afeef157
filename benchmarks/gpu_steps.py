"""What the benchmarks of GPU edges share: a book of results, sides that are asked under a time limit, and the loop that answers.

A *step* is one request to a worker process. What it gave goes into the book, a file with a line of JSON for each step, before the
next one begins; a step that hangs is ended with all its processes, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.common import Machine, Table, this_machine, today, write_report
from benchmarks.workers import ROOT, Worker, WorkerFailed, without_folders

Request = Mapping[str, Any]
Result = dict[str, Any]
Measure = Callable[[Any, Request], Result]


class WrongValue(Exception):
    """A graph gave something else than the reference."""


@dataclass
class Book:
    """Results of steps, in a file as soon as they are there.

    Attributes:
        path: the file; it is begun anew.
        rows: all of them: ``step``, ``side``, and what the step gave or ``failed``.
    """

    path: Path
    rows: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def add(self, step: str, side: str, result: Mapping[str, Any]) -> None:
        row = {"step": step, "side": side, **result}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        said = result.get("failed") or f"{result.get('taken_s', 0):.1f} s"
        print(f"{side}, {step}: {said}", file=sys.stderr, flush=True)

    def of(self, step: str, side: str) -> list[Result]:
        """What worked."""
        return [row for row in self.rows if (row["step"], row["side"]) == (step, side) and "failed" not in row]

    def blocks(self, step: str, side: str, key: str = "samples") -> list[list[float]]:
        """The samples of each block."""
        return [list(row[key]) for row in self.of(step, side)]

    def failures(self) -> list[str]:
        return [f"{row['side']}, {row['step']}: {row['failed']}" for row in self.rows if "failed" in row]

    @property
    def has_wrong_value(self) -> bool:
        return any("WrongValue" in failure for failure in self.failures())


@dataclass
class Side:
    """A worker that is started when it is first asked, and again after it had to be ended.

    Attributes:
        name: in the book.
        module, arguments: what runs.
        python, more_path, source: as `Worker` takes them.
        start_limit_s: imports and actors included.
    """

    name: str
    module: str
    arguments: Sequence[str] = ()
    python: str = sys.executable
    more_path: Sequence[str] = ()
    start_limit_s: float = 120.0
    source: Path = ROOT / "src"
    _worker: Worker | None = None

    def ask(self, book: Book, step: str, request: Request, *, limit_s: float) -> Result | None:
        """One step; None when it failed."""
        begin = time.monotonic()
        try:
            if self._worker is None or not self._worker.is_alive:
                self.close()
                self._worker = Worker(
                    self.module,
                    *self.arguments,
                    start_limit_s=self.start_limit_s,
                    python=self.python,
                    more_path=(str(ROOT), *self.more_path),
                    source=self.source,
                )
            result = self._worker.begin(request, limit_s=limit_s)
            self._worker.finish(limit_s=limit_s)
        except WorkerFailed as failure:
            book.add(step, self.name, {"failed": str(failure)})
            return None
        result["taken_s"] = time.monotonic() - begin
        book.add(step, self.name, result)
        return result

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close(limit_s=15)
            self._worker = None


def serve(state: Any, measures: Mapping[str, Measure], replies: IO[str]) -> None:
    """Answers the requests on stdin, each with a result or an error, until it ends."""

    def reply(**message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    reply(result={"init_us": 0.0})
    for line in sys.stdin:
        try:
            request = json.loads(line)
            reply(result=measures[request["measure"]](state, request))
            reply(done=True)
        except Exception as error:
            traceback.print_exc()
            reply(error=f"{type(error).__name__}: {str(error)[:500]}")


def own_replies() -> IO[str]:
    """The pipe that stdout was; what anything prints goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


# arguments and reports


def parser_of(module: str, document: str) -> argparse.ArgumentParser:
    """The arguments that all have."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{module}", description=document.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for the lines of JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a trial, also without GPUs")
    parser.add_argument("--report", action="store_true", help="write the report into benchmarks/reports/ and --out")
    parser.add_argument("--transport", default="auto", help="of the edges between actors")
    return parser


def add_ray(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ray", help="a folder that has the package ray, or a Python that imports it; left out without"
    )


def ray_side(name: str, where: str, arguments: Sequence[str]) -> Side:
    """Ray's worker."""
    is_folder = Path(where).is_dir()
    return Side(
        name,
        "benchmarks.ray_gpu_worker",
        arguments,
        python=sys.executable if is_folder else where,
        more_path=[where] if is_folder else [],
    )


def median_of(blocks: Sequence[Sequence[float]]) -> float | None:
    samples = [value for block in blocks for value in block]
    return statistics.median(samples) if samples else None


def spread_of(blocks: Sequence[Sequence[float]], scale: float = 1.0, digits: int = 2) -> str:
    """The median, with the lowest and the highest median of a block."""
    medians = [statistics.median(block) * scale for block in blocks if block]
    if not medians:
        return "-"
    whole = statistics.median(value * scale for block in blocks for value in block)
    return f"{whole:.{digits}f} ({min(medians):.{digits}f} to {max(medians):.{digits}f})"


def on_quick_and_slow_cores(
    book: Book, step: str, side: str, most_us: float
) -> tuple[list[list[float]], list[list[float]]]:
    """The blocks of a step behind which the slowest of its hosts took at most so long for its bit of Python, and the others."""
    rows = book.of(step, side)
    quick = [list(row["samples"]) for row in rows if max(row["host_us"]) <= most_us]
    return quick, [list(row["samples"]) for row in rows if max(row["host_us"]) > most_us]


def machine_in_words() -> tuple[Machine, str]:
    """For the name of the report and for its head."""
    import torch

    machine = this_machine(("crossfade", "torch", "cuda-bindings"))
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not gpus:
        return machine, str(machine)
    name = f"{len(gpus)} x {gpus[0]}"
    slug = name.lower().replace(" x ", "-").replace(" ", "-")
    return Machine(slug, "", "", ""), f"{name}; {machine}"


def publish(
    question: str, title: str, book: Book, options: argparse.Namespace, tables: Sequence[Table], text: str
) -> None:
    """Prints, and writes the report if asked."""
    for table in tables:
        table.show()
    print(text)
    for failure in book.failures():
        print(f"! {failure}")
    if not options.report:
        return
    machine, words = machine_in_words()
    command = without_folders(" ".join(["python", "-m", f"benchmarks.{question}", *sys.argv[1:]]))
    failed = "".join(f"\n- {failure}" for failure in book.failures())
    parts = [f"# {title}", f"{words}; {today()}; `{command}`", text, *(table.markdown() for table in tables)]
    if failed:
        parts.append(f"Steps that failed:\n{failed}")
    path = write_report(question, machine, "\n\n".join(parts) + "\n")
    shutil.copy(path, options.out)
    print(f"wrote {path.name}")
