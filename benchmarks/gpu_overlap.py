"""The documentation's overlap program on GPUs, beside the limit that its parts set and beside Ray Compiled Graph.

Run ``python -m benchmarks.gpu_overlap`` from the root of the repository: ``--report`` to write the Markdown report, ``--quick`` for
a trial with small tensors, also without GPUs, ``--ray`` to run Ray beside it. Three senders make a tensor of 10000 x 10000 fp16
each, one receiver multiplies each with itself and reads one element of the product; static shapes, direct return. Random data. What
is wanted is wanted of four GPUs; where there are two or three, the senders share one.

*Limit*: three products, one tensor made and one transfer, each measured alone in the same processes, on the devices' clocks, with
nothing of crossfade around them; *three in a row* are the receiver's products alone, one after another without a pause. What the
receiver's method does besides and what the transfers cost products is measured in the receiver's process, too, in plain torch:
products with an element read after each, and the same while their tensors come from the senders' GPUs, two slots each. How fast a
GPU at its power limit multiplies depends on the numbers and on what it did before: products alone are of numbers like those that
come from senders, their blocks stand among the others, and before each block that same load runs for a second. All sides take
turns in blocks; behind each, the receiver's core is timed at a bit of Python, since cores of a shared machine may be at half their
speed for seconds. Ray's processes are ended before the others go on. Every result is checked twice: against float64, and exactly
against those of other executions. Steps are written to ``--out`` as they end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Table
from benchmarks.gpu_programs import NUM_SENDERS
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

WANTED_ALONE, WANTED_INFLIGHT = 1.06, 1.05
MODES = {
    "with overlap": {"overlap": True, "inflight": 1},
    "without overlap": {"overlap": False, "inflight": 1},
    "with overlap, 4 in flight": {"overlap": True, "inflight": 4},
    "without overlap, 4 in flight": {"overlap": False, "inflight": 4},
}
ALONE, IN_A_ROW = "three products", "three products, of many in a row"
PRODUCTS = {ALONE: {"in_a_row": False}, IN_A_ROW: {"in_a_row": True}}
READ, BENEATH = "three products, an element read after each", "the same with three transfers beneath"
READS = {READ: {"beneath": False}, BENEATH: {"beneath": True}}
MEASURE_OF = dict.fromkeys(PRODUCTS, "products") | dict.fromkeys(READS, "reads") | dict.fromkeys(MODES, "overlap")
LIMIT_S, RAY_LIMIT_S = 120.0, 60.0
QUICK = 1.3
US_PER_MS = 1e3


def measure(book: Book, options: argparse.Namespace, device: str) -> None:
    """All rounds; crossfade's worker lives through them."""
    crossfade = Side("crossfade", "benchmarks.gpu_worker", (device, options.transport))
    request = {"size": options.size, "num": options.num}
    try:
        crossfade.ask(book, "bare", {"measure": "bare", **request}, limit_s=LIMIT_S)
        for number in range(options.rounds):
            blocks: list[tuple[str, dict[str, Any]]] = [*PRODUCTS.items(), *READS.items(), *MODES.items()]
            for name, block in blocks if number % 2 == 0 else blocks[::-1]:
                crossfade.ask(book, name, {"measure": MEASURE_OF[name], **block, **request}, limit_s=LIMIT_S)
            if options.ray and number < options.ray_rounds:
                _measure_ray(book, options.ray, device, request)
        crossfade.ask(book, "bare", {"measure": "bare", **request}, limit_s=LIMIT_S)
    finally:
        crossfade.close()


def _measure_ray(book: Book, where: str, device: str, request: dict[str, int]) -> None:
    """A worker for each way to compile: Ray's actors take part in one graph."""
    for overlap in (True, False):
        side = ray_side("Ray", where, (device,))
        try:
            side.ask(book, "version", {"measure": "version"}, limit_s=RAY_LIMIT_S)
            for name, mode in MODES.items():
                if mode["overlap"] is overlap:
                    asked = {"measure": "overlap", **mode, **request}
                    if side.ask(book, name, asked, limit_s=RAY_LIMIT_S) is None:
                        return
        finally:
            side.close()


def tables_of(book: Book) -> tuple[list[Table], dict[str, float]]:
    """The tables, and what was wanted: medians over their limits."""
    parts = {key: book.blocks("bare", "crossfade", key) for key in ("made", "moved")}
    parts |= {name: book.blocks(name, "crossfade") for name in (*PRODUCTS, *READS)}
    medians = {key: median_of(blocks) or float("nan") for key, blocks in parts.items()}
    limit_us = medians[ALONE] + medians["made"] + medians["moved"]
    limits = Table("The parts alone, ms", ["what", "median (lowest and highest block)"])
    for key, words in (
        (ALONE, ALONE),
        ("made", "one tensor made"),
        ("moved", "one transfer"),
        (IN_A_ROW, IN_A_ROW),
        (READ, READ),
        (BENEATH, BENEATH),
    ):
        limits.add(words, spread_of(parts[key], 1 / US_PER_MS, 3))
    limits.add("limit: the first three together", f"{limit_us / US_PER_MS:.3f}")
    ratios = {BENEATH: medians[BENEATH] / medians[IN_A_ROW]}
    runs = Table("One execution, ms", ["by", "how", "median (lowest and highest block)", "over the limit", "blocks"])
    for side in ("crossfade", "Ray"):
        for name, mode in MODES.items():
            blocks = book.blocks(name, side)
            if not blocks:
                continue
            under_us = limit_us if mode["inflight"] == 1 else medians[IN_A_ROW]
            over = statistics.median(value for block in blocks for value in block) / under_us
            ratios[f"{side}, {name}"] = over
            runs.add(side, name, spread_of(blocks, 1 / US_PER_MS, 3), f"{over:.3f}", str(len(blocks)))
    return [limits, runs, _by_cores(book, limit_us, medians[IN_A_ROW])], ratios


def _by_cores(book: Book, limit_us: float, in_a_row_us: float) -> Table:
    """The same ratios, by how fast the receiver's core was behind the block. What is wanted is of all blocks."""
    under_us = {BENEATH: in_a_row_us}
    under_us |= {name: limit_us if mode["inflight"] == 1 else in_a_row_us for name, mode in MODES.items()}
    hosts_us = [value for name in under_us for block in book.blocks(name, "crossfade", "host_us") for value in block]
    quickest_us, slowest_us = min(hosts_us, default=0.0), max(hosts_us, default=0.0)
    table = Table(
        f"Over the limit, by the receiver's core (a bit of Python took it {quickest_us:.0f} to {slowest_us:.0f} us)",
        ["what", f"at most {QUICK} x the quickest", "blocks", "slower", "blocks"],
    )
    for name, under in under_us.items():
        quick, slow = on_quick_and_slow_cores(book, name, "crossfade", QUICK * quickest_us)
        table.add(name, spread_of(quick, 1 / under, 3), str(len(quick)), spread_of(slow, 1 / under, 3), str(len(slow)))
    return table


def verdict(ratios: dict[str, float]) -> tuple[str, bool]:
    """In words, and whether both are met."""
    alone = ratios.get("crossfade, with overlap", float("nan"))
    inflight = ratios.get("crossfade, with overlap, 4 in flight", float("nan"))
    text = (
        f"With overlap, one execution at a time takes {alone:.3f} of the limit (at most {WANTED_ALONE} wanted); with 4 in flight "
        f"an execution takes {inflight:.3f} of three products in a row (at most {WANTED_INFLIGHT} wanted). Over the limit: "
        "one at a time over three products + one tensor made + one transfer, in flight over three products in a row. "
        f"Plain torch that reads an element after each product, with the transfers beneath, takes {ratios[BENEATH]:.3f} of it."
    )
    return text, alone <= WANTED_ALONE and inflight <= WANTED_INFLIGHT


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints: 2 when a value was wrong, 1 when a figure that is wanted here was not met or crossfade failed."""
    parser = parser_of("gpu_overlap", __doc__ or "")
    add_ray(parser)
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each side")
    parser.add_argument("--ray-rounds", type=int, default=2, help="rounds in which Ray takes part")
    parser.add_argument("--num", type=int, default=30, help="executions in a block")
    parser.add_argument("--size", type=int, default=10_000, help="rows and columns of a tensor")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    device = "cuda" if num_gpus >= 2 else "cpu"
    if options.ray and device == "cuda" and num_gpus <= NUM_SENDERS:
        parser.error(f"Ray's actors have a GPU each, and there are {num_gpus}")
    if options.quick:
        options.rounds, options.ray_rounds, options.num = 2, 1, 5
    if options.quick or device == "cpu":
        options.size = min(options.size, 256)
    book = Book(Path(options.out) / "gpu_overlap.jsonl")
    measure(book, options, device)
    tables, ratios = tables_of(book)
    text, is_met = verdict(ratios)
    parameters = f"{options.size} x {options.size} on {device}, {options.num} executions in a block. "
    ray = [str(row["version"]) for row in book.of("version", "Ray")]
    text = parameters + (f"Ray {ray[0]}. " if ray else "Ray was not run. ") + text
    publish("gpu_overlap", "The overlap program on GPUs", book, options, tables, f"{__doc__}\n{text}")
    if book.has_wrong_value:
        return 2
    has_failed = any(failure.startswith("crossfade") for failure in book.failures())
    return 1 if has_failed or (num_gpus > NUM_SENDERS and not is_met) else 0


if __name__ == "__main__":
    sys.exit(main())
