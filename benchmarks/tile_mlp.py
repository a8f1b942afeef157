"""Forward and backward of a tensor-parallel MLP block: crossfade's layers beside plain torch and NCCL.

``python -m benchmarks.tile_mlp run OUT.jsonl [options]`` measures on all GPUs (``--ranks``), ``--quick`` on CPU processes in
small; ``python -m benchmarks.tile_mlp report OUT.jsonl`` makes the report. Files, limits, blocks that take turns, captured and
eager, are those of ``benchmarks.tile_ops``, and NVLink multicast is off as there.

Each rank has its part of the sequence: it is gathered and multiplied up, goes through silu (*gated*: silu of one half times the
other), is multiplied down and summed over the ranks, each of which gets its part of the sequence. A call is that and the
gradients of the input and of both weights. *cuBLAS + NCCL* does one after the other; *weight gradients beside* computes a
weight's gradient while NCCL scatters the input's, as Megatron does; *products alone* has no communication: no way takes less.
Random operands; outputs and gradients are compared with the same in float64: all elements together may be off by 1 %, one by
0.2 of their root mean square.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Machine, Table, today, write_report
from benchmarks.tile_crew import Crew
from benchmarks.tile_figures import Measured
from benchmarks.tile_ops import Book, run
from benchmarks.tile_report import MACHINE, US_PER_MS, slug_of
from benchmarks.tile_rows import BESIDE, CROSSFADE, PRODUCTS, SERIAL, Block
from benchmarks.workers import without_folders

WANTED = 1.15
HIDDEN, INNER = 8192, 28672


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or reports: 1 when a block could not be measured or a result was wrong."""
    options = _parser().parse_args(arguments)
    book = Book(options.out)
    if options.what == "report":
        publish(options.out, book.lines)
        return 0
    hidden, inner = HIDDEN, INNER
    if options.quick:
        options.ranks, options.device, options.tokens, hidden, inner = min(options.ranks, 2), "cpu", [64], 32, 48
        options.rounds, options.batches, options.calls = 2, 1, 4
    blocks = [
        Block(tokens, hidden, inner, options.ranks, is_gated=kind == "gated")
        for kind in options.blocks
        for tokens in options.tokens
    ]
    request = {
        "measure": "mlp",
        "candidates": [each.strip() for each in options.candidates.split(";") if each.strip()],
        "modes": options.modes.split(","),
        "num_rounds": options.rounds,
        "num_batches": options.batches,
        "num_calls": options.calls,
    }
    first = {"measure": "join", "buffer_bytes": max(each.buffer_bytes for each in blocks), "heap_bytes": 0}
    crew = Crew(options.ranks, options.device, first)
    try:
        run(book, blocks, crew, request, seconds=options.seconds, limit_s=options.limit, say=say)
    finally:
        if crew.joined:
            command = " ".join(["python", "-m", "benchmarks.tile_mlp", *(arguments or sys.argv[1:])])
            book.add({MACHINE: crew.joined[0]["machine"], "command": command})
        crew.close()
    if options.report:
        publish(options.out, book.lines)
    is_wrong = any("right" in side["errors"] for line in book.lines for side in line.get("sides", {}).values())
    return 1 if is_wrong or any(not book.is_done(each.key) for each in blocks) else 0


def say(line: Mapping[str, Any]) -> str:
    """A measured block in one line."""
    cells = zip(COLUMNS[1:], _cells(line)[1:], strict=True)
    errors = [f"! {name} {what}: {why}" for name, side in line["sides"].items() for what, why in side["errors"].items()]
    return f"{line['key']} ({line['taken_s']:.1f} s): " + "; ".join(
        [*(f"{name} {cell}" for name, cell in cells), *errors]
    )


COLUMNS = (
    "tokens, hidden, inner", PRODUCTS, SERIAL, "weight gradients beside", "crossfade, plain", CROSSFADE, "x over cuBLAS + NCCL",
    "x over weight gradients beside", "products alone over it", "largest error: cuBLAS + NCCL", "crossfade",
)  # fmt: skip


def _cells(line: Mapping[str, Any]) -> list[str]:
    each = _measured(line)
    times = [_ms(each, name) for name in (PRODUCTS, SERIAL, BESIDE, "plain", CROSSFADE)]
    ratios = [each.over(name) for name in (SERIAL, BESIDE)]
    alone, own = each.us(PRODUCTS), each.us(CROSSFADE)
    share = "-" if alone is None or own is None else f"{alone / own:.2f}"
    errors = [f"{line['sides'][name]['worst']:.1e}" for name in (SERIAL, CROSSFADE)]
    return [
        Block(**line["row"]).sizes,
        *times,
        *("-" if found is None else str(found) for found in ratios),
        share,
        *errors,
    ]


def _measured(line: Mapping[str, Any]) -> Measured:
    """Its times and ratios; what belongs to one operator is not asked."""
    row: Any = Block(**line["row"])
    return Measured(row, line["sides"], line["choice"], 0)


def _ms(each: Measured, name: str) -> str:
    time_us, spread = each.us(name), each.series(name).spread()
    if time_us is None or spread is None:
        return "-"
    return f"{time_us / US_PER_MS:.3f} ({spread[0] / US_PER_MS:.3f} to {spread[1] / US_PER_MS:.3f})"


def tables(lines: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Times and ratios, all sides, and what was chosen."""
    done = [line for line in lines if "sides" in line]
    main_table = Table(f"Forward and backward, ms (wanted: {WANTED} x over cuBLAS + NCCL)", COLUMNS)
    names = list(dict.fromkeys(name for line in done for name in line["sides"]))
    every = Table("All sides, ms, captured / eager", ("by", *(Block(**line["row"]).sizes for line in done)))
    chosen = Table("What was chosen", ("operator", "by"))
    for line in done:
        main_table.add(*_cells(line))
        for shape, by in line["choice"]["chosen"].items():
            chosen.add(shape, by)
    for name in names:
        found = [[_measured(line).us(name, mode) for mode in ("captured", "eager")] for line in done]
        shown = [" / ".join("-" if us is None else f"{us / US_PER_MS:.3f}" for us in pair) for pair in found]
        every.add(name, *shown)
    return [main_table, every, chosen]


def publish(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes the report into the folder of reports, and beside the file of results."""
    machines = list(dict.fromkeys(line[MACHINE] for line in lines if MACHINE in line))
    commands = dict.fromkeys(without_folders(line["command"]) for line in lines if MACHINE in line)
    failed = [
        f"- {line['key']}, at {line['doing']}: {without_folders(line['failed'])}" for line in lines if "failed" in line
    ]
    errors = [
        f"- {line['key']}: {name}, {what}: {without_folders(why)}"
        for line in lines
        for name, side in line.get("sides", {}).items()
        for what, why in side["errors"].items()
    ]
    parts = ["# A tensor-parallel MLP block", *(f"{machine}. {today()}." for machine in machines)]
    parts += ["\n".join(f"- `{command}`" for command in commands), (__doc__ or "").partition("\n")[2].strip()]
    parts += [table.markdown() for table in tables(lines)]
    if failed or errors:
        parts.append("## What could not be done\n" + "\n".join([*failed, *errors]))
    report = write_report("tile_mlp", Machine(slug_of(machines), "", "", ""), "\n\n".join(parts) + "\n")
    path.with_suffix(".md").write_text(report.read_text())
    print(f"wrote {report.name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.tile_mlp", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("out", type=Path, help="the file of results, one line of JSON for each block")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 4096], help="of all ranks")
    parser.add_argument("--blocks", nargs="+", default=["silu", "gated"], choices=("silu", "gated"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no block is begun afterwards")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one try of a block")
    parser.add_argument("--candidates", default="plain;rounds(rounds=1);rounds(rounds=2)", help="with ; between")
    parser.add_argument("--modes", default="captured,eager")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--report", action="store_true", help="write the report too")
    parser.add_argument("--quick", action="store_true", help="a trial in small, on CPU processes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
