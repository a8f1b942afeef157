"""How long a GPU tensor takes through two actors: driver, GPU actor, GPU actor, driver; beside a bare copy and beside Ray.

Run ``python -m benchmarks.gpu_hops`` from the root of the repository: ``--report``, ``--quick`` and ``--ray`` as for
``benchmarks.gpu_overlap``. The first actor gives one of four random fp16 tensors that it has already, the second gives back its
shape, or reads its last element; static shapes, direct return, one execution at a time. Every result is checked, and with crossfade
every element of some. The bare copy is one transfer of that size by the copy engine between the same GPUs, alone, on the
devices' clocks. Behind each block every host is timed at a bit of Python: cores of a shared machine may be at half their speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Table
from benchmarks.gpu_steps import (
    Book,
    Side,
    add_ray,
    median_of,
    on_quick_and_slow_cores,
    parser_of,
    publish,
    ray_side,
    spread_of,
)

KB, MB = 1 << 10, 1 << 20
SIZES = {"2 KB": 2 * KB, "2 MB": 2 * MB, "128 MB": 128 * MB}
SHAPE_LIMIT_US, ELEMENT_LIMIT_US = 45.0, 75.0
COPY_FACTOR, COPY_MORE_US = 1.1, 75.0
WORDS = {"shape": "shape only", "last": "one element read"}
LIMIT_S, RAY_LIMIT_S = 90.0, 45.0
QUICK = 1.3


def measure(book: Book, options: argparse.Namespace, device: str, sizes: dict[str, int]) -> None:
    """Sizes one after the other, since actors hold GPUs; blocks of one size in turn."""
    crossfade = Side("crossfade", "benchmarks.gpu_worker", (device, options.transport))
    try:
        for size, size_bytes in sizes.items():
            num = options.num if size_bytes <= 2 * MB else max(10, options.num // 5)
            request = {"size_bytes": size_bytes, "num": num}
            for number in range(options.rounds):
                for what in list(WORDS) if number % 2 == 0 else list(WORDS)[::-1]:
                    crossfade.ask(
                        book, f"{size}, {what}", {"measure": "hops", "what": what, **request}, limit_s=LIMIT_S
                    )
                crossfade.ask(book, f"{size}, bare", {"measure": "bare_hop", **request, "num": 10}, limit_s=LIMIT_S)
    finally:
        crossfade.close()
    if options.ray:
        _measure_ray(book, options, device, sizes)


def _measure_ray(book: Book, options: argparse.Namespace, device: str, sizes: dict[str, int]) -> None:
    """A worker for each case: an actor of Ray's takes part in one graph, and taking one down has hung."""
    for what in options.ray_what:
        for size, size_bytes in sizes.items():
            side = ray_side("Ray", options.ray, (device,))
            try:
                side.ask(book, "version", {"measure": "version"}, limit_s=RAY_LIMIT_S)
                request = {"measure": "hops", "what": what, "size_bytes": size_bytes, "num": max(10, options.num // 5)}
                if side.ask(book, f"{size}, {what}", request, limit_s=RAY_LIMIT_S) is None:
                    return
            finally:
                side.close()


def limit_us(size: str, what: str, bare_us: float | None) -> float:
    """What was wanted."""
    if SIZES[size] > 2 * MB:
        return COPY_FACTOR * (bare_us or float("nan")) + COPY_MORE_US if what == "last" else float("inf")
    return SHAPE_LIMIT_US if what == "shape" else ELEMENT_LIMIT_US


def table_of(book: Book, sizes: dict[str, int]) -> tuple[Table, bool]:
    """The table, and whether all that was wanted is met."""
    table = Table(
        "Driver, GPU actor, GPU actor, driver: us, median (lowest and highest block)",
        ["tensor", "what", "crossfade", "wanted: at most", "met", "bare copy", "Ray"],
    )
    is_met = True
    for size in sizes:
        bare = book.blocks(f"{size}, bare", "crossfade")
        for what, words in WORDS.items():
            mine, theirs = (book.blocks(f"{size}, {what}", side) for side in ("crossfade", "Ray"))
            most_us, median_us = limit_us(size, what, median_of(bare)), median_of(mine)
            fits = median_us is not None and median_us <= most_us
            is_met = is_met and fits
            wanted = "-" if most_us == float("inf") else f"{most_us:.1f}"
            met = "-" if most_us == float("inf") else "yes" if fits else "NO"
            table.add(size, words, spread_of(mine), wanted, met, spread_of(bare), spread_of(theirs))
    return table, is_met


def by_cores(book: Book, sizes: dict[str, int]) -> Table:
    """The same, by how fast the slowest of the three hosts was behind the block. What is wanted is of all blocks."""
    steps = [(size, what) for size in sizes for what in WORDS]
    hosts = [max(row["host_us"]) for size, what in steps for row in book.of(f"{size}, {what}", "crossfade")]
    quickest_us, slowest_us = min(hosts, default=0.0), max(hosts, default=0.0)
    table = Table(
        f"By the slowest of the three cores (a bit of Python took it {quickest_us:.0f} to {slowest_us:.0f} us): us",
        ["tensor", "what", f"at most {QUICK} x the quickest", "blocks", "slower", "blocks"],
    )
    for size, what in steps:
        quick, slow = on_quick_and_slow_cores(book, f"{size}, {what}", "crossfade", QUICK * quickest_us)
        table.add(size, WORDS[what], spread_of(quick), str(len(quick)), spread_of(slow), str(len(slow)))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints: 2 when a value was wrong, 1 when a wanted figure was not met or a step of crossfade's failed."""
    parser = parser_of("gpu_hops", __doc__ or "")
    add_ray(parser)
    parser.add_argument(
        "--ray-what", nargs="+", choices=WORDS, default=list(WORDS), help="the cases in which Ray takes part"
    )
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each measure")
    parser.add_argument(
        "--num", type=int, default=500, help="executions in a block; a fifth of it for 128 MB, and for Ray"
    )
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    sizes = dict(SIZES)
    if options.quick:
        options.rounds, options.num = 2, 50
    if options.quick and device == "cpu":
        del sizes["128 MB"]
    book = Book(Path(options.out) / "gpu_hops.jsonl")
    measure(book, options, device, sizes)
    table, is_met = table_of(book, sizes)
    ray = [str(row["version"]) for row in book.of("version", "Ray")]
    text = f"{__doc__}\nOn {device}. " + (f"Ray {ray[0]}." if ray else "Ray was not run.")
    tables = [table, by_cores(book, sizes)]
    publish("gpu_hops", "A GPU tensor through two actors", book, options, tables, text)
    if book.has_wrong_value:
        return 2
    has_failed = any(failure.startswith("crossfade") for failure in book.failures())
    return 1 if has_failed or (device == "cuda" and not is_met) else 0


if __name__ == "__main__":
    sys.exit(main())
