"""Whether GPU edges are right: random graphs, poisoned slots, kills in mid-transfer.

Run ``python -m benchmarks.gpu_correctness`` from the root of the repository: ``--report``, ``--quick`` as for
``benchmarks.gpu_overlap``; ``--only`` for a part. *Random graphs* have up to eight nodes with tensors of many sizes, dtypes and
containers, values used several times, methods that raise, 1 to 4 executions in flight, with and without overlap, over each
transport in turn; what processes on GPUs give has to equal, bit for bit, what the inline engine gives in one thread on the CPU.
*Poisoned slots*: one graph, a value that changes with every execution, four in flight; the reader overwrites each slot before it
gives it back, and keeps a value now and then. *Kills*: one of three actors in a row is killed while large tensors go through
them; the error has to name it within two seconds, no wrong value may come out, the survivors have to work on, and all
memory has to be free again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Table
from benchmarks.gpu_proofs import SLACK_BYTES
from benchmarks.gpu_steps import Book, Side, parser_of, publish

PARTS = ("graphs", "poisoned", "kills")
REPORT_LIMIT_S = 2.0
CHUNK = 25


def measure(book: Book, options: argparse.Namespace, device: str) -> None:
    """Each part in a worker of its own."""
    for part in options.only:
        side = Side("crossfade", "benchmarks.gpu_proofs", (device,))
        try:
            {"graphs": _graphs, "poisoned": _poisoned, "kills": _kills}[part](book, options, side, device)
        finally:
            side.close()


def _graphs(book: Book, options: argparse.Namespace, side: Side, device: str) -> None:
    """In small steps, so that one that hangs costs little; transports take turns."""
    for number in range(options.graphs // CHUNK):
        if time.monotonic() > options.end:
            return
        transport = options.transports[number % len(options.transports)]
        request = {
            "measure": "random_graphs",
            "seed": options.seed + number,
            "num": CHUNK,
            "transports": [transport],
            "with_large": not options.quick,
        }
        side.ask(book, f"graphs, {transport}", request, limit_s=options.limit)


def _poisoned(book: Book, options: argparse.Namespace, side: Side, device: str) -> None:
    num_steps = 2 if options.quick else 10
    for _ in range(num_steps):
        request = {
            "measure": "poisoned",
            "num": options.executions // num_steps,
            "num_words": 8192,
            "transport": options.transport,
        }
        if side.ask(book, "poisoned", request, limit_s=options.limit) is None:
            return


def _kills(book: Book, options: argparse.Namespace, side: Side, device: str) -> None:
    num_words = (32 << 20) if device == "cuda" else (1 << 18)
    for number in range(options.kills):
        if time.monotonic() > options.end:
            return
        request = {
            "measure": "kill",
            "seed": options.seed + number,
            "num_words": num_words,
            "transport": options.transport,
            "most_wait_s": 0.1,
        }
        side.ask(book, "kill", request, limit_s=options.limit)


def table_of(book: Book, options: argparse.Namespace) -> tuple[Table, bool]:
    """The table, and whether everything that was asked for was done and right."""
    table = Table("What was run", ["what", "number", "wrong", "steps that failed", "more"])
    is_right = True
    failures = book.failures()
    if "graphs" in options.only:
        num_done = sum(row["graphs"] for row in book.rows if "graphs" in row)
        is_right = num_done == options.graphs // CHUNK * CHUNK
        for transport in dict.fromkeys(options.transports):
            step = f"graphs, {transport}"
            rows, failed = book.of(step, "crossfade"), [text for text in failures if f", {step}: " in text]
            num_wrong = sum("WrongValue" in text for text in failed)
            sums = {key: sum(row[key] for row in rows) for key in ("graphs", "executions", "nodes")}
            more = f"{sums['executions']} executions, {sums['nodes']} nodes"
            table.add(f"random graphs, {transport}", str(sums["graphs"]), str(num_wrong), str(len(failed)), more)
            is_right = is_right and not failed
    if "poisoned" in options.only:
        rows = book.of("poisoned", "crossfade")
        failed = [text for text in failures if ", poisoned: " in text]
        num = sum(row["executions"] for row in rows)
        each = f"{statistics.median(row['each_us'] for row in rows):.1f} us each" if rows else ""
        table.add("executions, slots poisoned", str(num), str(len(failed)), str(len(failed)), each)
        is_right = is_right and not failed and num == options.executions
    if "kills" in options.only:
        rows = book.of("kill", "crossfade")
        failed = [text for text in failures if ", kill: " in text]
        late = [row for row in rows if row["reported_s"] > REPORT_LIMIT_S]
        lost = [row for row in rows if row["lost_bytes"] > SLACK_BYTES]
        times_s = sorted(row["reported_s"] for row in rows)
        more = f"{len(late)} reported after {REPORT_LIMIT_S:g} s, {len(lost)} lost memory"
        if times_s:
            more += f"; reported after {statistics.median(times_s):.3f} s (at most {times_s[-1]:.3f})"
        table.add("kills", str(len(rows)), str(sum("WrongValue" in text for text in failed)), str(len(failed)), more)
        is_right = is_right and not failed and not late and not lost and len(rows) == options.kills
    return table, is_right


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs and prints: 2 when a value was wrong, 1 when something else was not as it has to be."""
    parser = parser_of("gpu_correctness", __doc__ or "")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    parser.add_argument("--graphs", type=int, default=1000, help="random graphs")
    parser.add_argument("--executions", type=int, default=100_000, help="executions with poisoned slots")
    parser.add_argument("--kills", type=int, default=30, help="kills")
    parser.add_argument("--seed", type=int, default=2026, help="of graphs and kills: another one gives others")
    parser.add_argument("--seconds", type=float, default=540, help="no random graph and no kill begins later")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a step")
    parser.add_argument("--transports", nargs="+", help="of random graphs, in turn; on GPUs all that there are")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    options.end = time.monotonic() + options.seconds
    everywhere = ["auto", "copy", "staged", "copy", "nccl", "auto", "copy", "shm", "copy", "staged"]
    everywhere += [each.replace("nccl", "copy") for each in everywhere]  # making its groups takes long
    options.transports = options.transports or (everywhere if device == "cuda" else ["auto", "shm"])
    if options.quick:
        options.graphs, options.executions, options.kills = 2 * CHUNK, 1000, 2
    book = Book(Path(options.out) / "gpu_correctness.jsonl")
    measure(book, options, device)
    table, is_right = table_of(book, options)
    text = f"{__doc__}\nOn {device}; transport of poisoned slots and kills: {options.transport}."
    publish("gpu_correctness", "Whether GPU edges are right", book, options, [table], text)
    if book.has_wrong_value:
        return 2
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
