"""Products with their collectives, beside every other way to do the same on stock torch: a matrix of shapes.

``python -m benchmarks.tile_ops run OUT.jsonl [options]`` measures on all GPUs (``--ranks``), ``--quick`` on CPU processes with
tiny shapes; ``python -m benchmarks.tile_ops report OUT.jsonl`` makes the report and the plot of it, anywhere. Each row (an
operator with a shape) is appended to OUT.jsonl when it is done, and is not measured again: so a run may be cut off and gone on
with. A row that hangs loses what hung: the ranks are ended after ``--limit`` seconds and started anew, and the row is tried again
without it, twice at most. After ``--seconds`` no row is begun.

Within a row all sides take turns in blocks, in random order, captured into CUDA graphs of four calls and eager (``--modes``). A
batch is eight calls one behind the other between two events, behind a barrier of all ranks on the stream; the slowest rank of
each batch counts, then the median of all batches; a block of short calls has more batches, up to 16. In front of each block the
GPU multiplies the row's own operands for 20 ms, and for 0.4 s in front of the first, so that all blocks find it as warm. The
report's figures are those of graphs; what cannot be captured is eager, and says so. ``x`` is over bare calls of ``torch.mm``
and torch.distributed's collective. Operands are random; each output is compared with products and sums in float64, before and
after it is timed, in memory that was poisoned: all elements together may be off by 0.6 % (bf16), one by 0.15 of their root mean
square.
NVLink multicast is off for all sides (``NCCL_NVLS_ENABLE=0``, ``TORCH_SYMM_MEM_DISABLE_MULTICAST=1``; the workers' environment is
in ``benchmarks.tile_worker``). Where NCCL may use it, its all-reduces and reduce-scatters can be faster than the baselines here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tile_crew import Crew, Ranks
from benchmarks.tile_report import MACHINE, publish, summary
from benchmarks.tile_rows import AR, MATRICES, SHORT, Block, Row, rows_of
from benchmarks.workers import WorkerFailed
from crossfade.ops.calls.job import Operator

MAX_TRIES = 3
OTHER = "failed on another rank"
MAX_FALSE_STARTS = 2
"""After so many on end nothing else is tried."""
STARTING = frozenset({"starting", "joining"})
NOT_TO_BLAME = STARTING | {"operands", "the end of a row"}
Result = dict[str, Any]


class Book:
    """Rows in a file of JSON lines. Those of earlier runs count; a line that was cut off does not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[Result] = []
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if text and not text.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")

    def add(self, line: Result) -> None:
        """Appends it; it is on the disk when this returns."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def is_done(self, key: str) -> bool:
        """Whether a row was measured."""
        return any(line.get("key") == key and "failed" not in line for line in self.lines)

    def blamed(self, key: str) -> list[str]:
        """What hung or failed in earlier tries of a row."""
        found = [line["doing"] for line in self.lines if line.get("key") == key and "failed" in line]
        return [doing for doing in dict.fromkeys(found) if doing not in NOT_TO_BLAME]


def run(
    book: Book,
    rows: Iterable[Row | Block],
    crew: Ranks,
    request: Mapping[str, Any],
    *,
    seconds: float = float("inf"),
    limit_s: float = 90.0,
    kind: str = "",
    say: Callable[[Mapping[str, Any]], str] = summary,
) -> int:
    """Measures what the book does not have; gives the number of rows that were measured now.

    Args:
        book: where results go.
        rows: in this order.
        crew: who measures.
        request: what is asked about each row, besides the row.
        seconds: after so many no row is begun.
        limit_s: of one try of a row.
        kind: makes the rows of one kind of run other ones than those of another.
        say: a measured row in words.
    """
    begin, num_done, num_false_starts = time.monotonic(), 0, 0
    for row in rows:
        key = row.key + kind
        for _ in range(MAX_TRIES):
            if book.is_done(key) or time.monotonic() - begin > seconds or num_false_starts == MAX_FALSE_STARTS:
                break
            left_out, begun = book.blamed(key), time.monotonic()
            asked = {"measure": "row", "row": row.to_data(), "left_out": left_out, "limit_s": limit_s, **request}
            head = {"key": key, "row": row.to_data()}
            try:
                answers = crew.ask(asked, limit_s)
            except WorkerFailed as failure:
                doing = crew.doing()
                num_false_starts += doing in STARTING
                book.add({**head, "failed": str(failure), "doing": doing})
                print(f"{key}: {doing}: {failure}\n{crew.stacks()}", flush=True)
                continue
            num_false_starts = 0
            book.add({**head, **merge(answers), "left_out": left_out, "taken_s": time.monotonic() - begun})
            num_done += 1
            print(say(book.lines[-1]), flush=True)
    return num_done


def merge(answers: Sequence[Result]) -> Result:
    """One row of all ranks': of each batch the slowest; the first reason why something could not be done."""
    first = answers[0]
    sides: dict[str, Result] = {}
    for name, side in first["sides"].items():
        each = [answer["sides"][name] for answer in answers]
        found: Result = {"errors": {}, "worst": max(other["worst"] for other in each)}
        for mode in side.keys() - {"errors", "worst"}:
            blocks = zip(*(other[mode] for other in each), strict=True)
            found[mode] = [[max(batch) for batch in zip(*block, strict=True)] for block in blocks]
        for other in each:
            for what, why in other["errors"].items():
                if found["errors"].get(what, "failed on another rank") == "failed on another rank":
                    found["errors"][what] = why
        sides[name] = found
    return {"sides": sides, "choice": first["choice"], "num_sms": first["num_sms"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or reports: 1 when a row could not be measured or an output was wrong."""
    options = _parser().parse_args(arguments)
    path: Path = options.out
    if options.what == "report":
        publish(path, Book(path).lines, __doc__ or "", options.note)
        return 0
    if options.quick:
        options.rows, options.ranks, options.device = "tiny", min(options.ranks, 2), "cpu"
        options.rounds, options.batches, options.calls = 2, 1, 4
    operators = [SHORT[each] if each in SHORT else Operator(each) for each in options.operators]
    rows = rows_of(options.rows, operators, options.ranks)
    if options.shapes:
        sizes = [tuple(map(int, each.split(","))) for each in options.shapes]
        rows = [Row(operator, m, n, k, options.ranks) for operator in operators for m, n, k in sizes]
    candidates = [each.strip() for each in options.candidates.split(";") if each.strip()]
    if options.only_candidates and not candidates:
        raise SystemExit("--only-candidates measures those of --candidates, and there are none")
    book = Book(path)
    first = {
        "measure": "join",
        "buffer_bytes": max(row.buffer_bytes for row in rows),
        "heap_bytes": max((row.out_bytes for row in rows if row.operator == AR), default=0),
    }
    request = {
        "candidates": candidates,
        "only_baselines": options.only_baselines,
        "only_candidates": options.only_candidates,
        "modes": options.modes.split(","),
        "num_rounds": options.rounds,
        "num_batches": options.batches,
        "num_calls": options.calls,
        "seed": time.time_ns(),  # what ran before a block moves it by up to 10 %: another order in each run
    }
    crew = Crew(options.ranks, options.device, first)
    begin = time.monotonic()
    kind = f", {options.label}" if options.label else ", baselines" if options.only_baselines else ""
    try:
        run(book, rows, crew, request, seconds=options.seconds, limit_s=options.limit, kind=kind)
    finally:
        if crew.joined:
            command = " ".join(["python", "-m", "benchmarks.tile_ops", "run", *(arguments or sys.argv[2:])])
            book.add({MACHINE: crew.joined[0]["machine"], "command": command})
        crew.close()
    print(f"{time.monotonic() - begin:.0f} s")
    if options.report:
        publish(path, book.lines, __doc__ or "", options.note)
    keys = {row.key + kind for row in rows}
    done = [line for line in book.lines if line.get("key") in keys and "failed" not in line]
    is_wrong = any("right" in side["errors"] for line in done for side in line["sides"].values())
    return 1 if is_wrong or any(not book.is_done(key) for key in keys) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.tile_ops", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("out", type=Path, help="the file of results, one line of JSON for each row")
    parser.add_argument("--operators", nargs="+", default=[*SHORT], help=f"of {', '.join(SHORT)} or their names")
    parser.add_argument("--rows", choices=[*MATRICES], default="core")
    parser.add_argument("--shapes", nargs="+", help="M,N,K in the place of the matrix's rows")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row is begun afterwards")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one try of a row")
    parser.add_argument("--only-baselines", action="store_true", help="none of crossfade's own ways, no tuning")
    parser.add_argument("--candidates", default="", help="texts with ; between, in the place of those that are offered")
    parser.add_argument(
        "--only-candidates", action="store_true", help="those of --candidates and bare calls, no tuning"
    )
    parser.add_argument("--label", default="", help="rows with another label are other rows")
    parser.add_argument("--modes", default="captured,eager", help="captured, eager, or both")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each side")
    parser.add_argument("--batches", type=int, default=2, help="of a block")
    parser.add_argument("--calls", type=int, default=8, help="of a batch")
    parser.add_argument("--report", action="store_true", help="write the report too")
    parser.add_argument("--note", default="", help="a sentence for the report's head")
    parser.add_argument("--quick", action="store_true", help="a trial: tiny shapes on CPU processes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
