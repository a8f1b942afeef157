"""How long a small GPU tensor takes through two actors in the compiled build, beside the pure one, in turns within one run.

Run ``python -m benchmarks.gpu_builds FOLDER`` from the root of the repository; FOLDER has the compiled package (``make
test-compiled`` makes one in ``build/compiled``). Driver, GPU actor, GPU actor, driver, as in ``benchmarks.gpu_hops``, whose
steps these are; where there is one GPU the actors share it. Every result is checked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Table
from benchmarks.gpu_steps import Book, Side, parser_of, publish, spread_of

KB = 1 << 10
WHATS = {"shape": "2 KB, the receiver looks at its shape", "last": "2 KB, the receiver reads an element"}
LIMIT = 0.85
LIMIT_S = 90.0


def measure(book: Book, options: argparse.Namespace, sides: Sequence[Side]) -> None:
    """Blocks of both sides, each with actors of its own; which side begins changes from round to round."""
    try:
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                for what in WHATS:
                    request = {"measure": "hops", "what": what, "size_bytes": 2 * KB, "num": options.num}
                    side.ask(book, what, request, limit_s=LIMIT_S)
    finally:
        for side in sides:
            side.close()


def table_of(book: Book) -> tuple[Table, bool]:
    """The table, and whether the compiled build is as much sooner as it has to be."""
    columns = ["us, median (lowest and highest block)", "pure", "compiled", "compiled / pure, by blocks", "met"]
    table, is_met = Table("Driver, GPU actor, GPU actor, driver", columns), True
    for what, words in WHATS.items():
        pure, compiled = (book.blocks(what, side) for side in ("pure", "compiled"))
        ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(pure, compiled, strict=False)]
        fits = bool(ratios) and statistics.median(ratios) <= LIMIT
        is_met = is_met and fits
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        table.add(words, spread_of(pure), spread_of(compiled), spread, "yes" if fits else "NO")
    return table, is_met


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints: 2 when a value was wrong, 1 when a wanted figure was not met or a step failed."""
    parser = parser_of("gpu_builds", __doc__ or "")
    parser.add_argument("compiled", type=Path, help="the folder with the compiled package")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each side")
    parser.add_argument("--num", type=int, default=500, help="executions in a block")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments_ = (device, options.transport)
    sides = [
        Side("pure", "benchmarks.gpu_worker", arguments_),
        Side("compiled", "benchmarks.gpu_worker", arguments_, source=options.compiled.resolve()),
    ]
    book = Book(Path(options.out) / "gpu_builds.jsonl")
    measure(book, options, sides)
    table, is_met = table_of(book)
    shared = " All actors share the one GPU." if torch.cuda.device_count() == 1 else ""
    publish(
        "gpu_builds",
        "A GPU tensor through two actors, compiled and pure",
        book,
        options,
        [table],
        f"On {device}.{shared}",
    )
    if book.has_wrong_value:
        return 2
    return int(bool(book.failures()) or (device == "cuda" and not is_met))


if __name__ == "__main__":
    sys.exit(main())
