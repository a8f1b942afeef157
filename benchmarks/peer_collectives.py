"""Collectives by copy engines beside NCCL's: alone, beside matrix products, eager and captured.

``python -m benchmarks.peer_collectives run OUT.json`` measures on all GPUs, and writes after each case;
``python -m benchmarks.peer_collectives report OUT.json`` makes a report of it, anywhere.

Each measure repeats a collective as often as NCCL could while ten matrix products (8192^3, bf16) run, so that there is as much to
hide as there is to hide it behind. *Alone* is the time of one call, *beside* that of all calls with the products beside them,
*both* the time until the products and the calls have ended. All GPUs begin together; the slowest rank of each round counts.
Variants take turns. NCCL is measured on a stream of usual priority, on an urgent one, and with four groups on four streams in turn;
the best of the three counts. *Lanes* are collectives in flight on four streams in turn, *coalesced* ones have
four tensors in a call.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Machine, Table, this_machine, today, write_report
from benchmarks.device_copies import _gpus, spread

MB = 1 << 20
SIZES = {
    "all_gather": (4, 16, 64),
    "all_to_all": (16, 64, 256),
    "reduce_scatter": (16, 64, 256),
    "all_reduce": (16, 64, 256),
}
NCCLS = ("NCCL", "NCCL, urgent", "NCCL, 4 groups")


def _variants() -> dict[str, list[Any]]:
    """The ways to do each collective."""
    from benchmarks.peer_workers import OPS, Variant

    default = Variant("default")
    shared = [
        Variant("into shared", is_on_heap=True),
        Variant("into shared, 4 lanes", is_on_heap=True, num_lanes=4),
    ]
    in_place = [
        Variant("in place, shared", is_on_heap=True, is_in_place=True),
        Variant("in place, shared, 4 lanes", is_on_heap=True, is_in_place=True, num_lanes=4),
    ]
    sums = [default, Variant("4 lanes", num_lanes=4), Variant("4 coalesced", num_coalesced=4)]
    reduces = [
        *sums,
        Variant("into shared", is_on_heap=True),
        Variant("into shared, 4 lanes", is_on_heap=True, num_lanes=4),
        Variant("into shared, 4 coalesced", is_on_heap=True, num_coalesced=4),
    ]
    moves = {"all_gather": [default, *shared, *in_place], "all_to_all": [default, *shared], "all_reduce": reduces}
    return {op: moves.get(op, sums) for op in OPS}


def run(path: Path) -> None:
    """Measures, and leaves in the file what was measured when something fails."""
    import torch

    from benchmarks import peer_workers as w
    from tests.helpers.device_pair import run_workers

    num = torch.cuda.device_count()
    cases = [w.Case(op, size) for op, sizes in SIZES.items() for size in sizes]
    modes = ("eager", "captured")
    folder = Path(tempfile.mkdtemp())
    begin, failed = time.monotonic(), ""
    args = [
        (
            rank,
            num,
            os.fspath(folder / "store"),
            os.fspath(folder),
            cases,
            _variants(),
            modes,
            9,
        )
        for rank in range(num)
    ]
    limit_s = float(os.environ.get("LIMIT_S", "200"))
    try:
        run_workers([w.run] * num, args, timeout_s=limit_s)
    except Exception:
        failed = traceback.format_exc()[-3000:]
        print(failed, flush=True)
    ranks = [json.loads(file.read_text()) for rank in range(num) if (file := folder / f"rank{rank}.json").exists()]
    cases_done = [name for name in ranks[0] if all(name in each for each in ranks)] if len(ranks) == num else []
    machine = {"text": str(this_machine(("torch", "cuda-bindings", "triton"))), **_gpus()}
    results = {
        "machine": machine,
        "failed": failed,
        "taken_s": time.monotonic() - begin,
        "cases": {name: merge([each[name] for each in ranks]) for name in cases_done},
    }
    path.write_text(json.dumps(results))
    for table in tables(results):
        table.show()


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank of each round."""
    out: dict[str, Any] = {"num_calls": ranks[0]["num_calls"], "variants": {}}
    out["GEMMs alone"] = [max(row) for row in zip(*(each["GEMMs alone"] for each in ranks), strict=True)]
    for name in ranks[0]["variants"]:
        rows = [each["variants"][name] for each in ranks]
        beside = list(zip(*(row["beside"] for row in rows), strict=True))
        out["variants"][name] = {
            "alone": [max(values) for values in zip(*(row["alone"] for row in rows), strict=True)],
            **{key: [max(each[key] for each in values) for values in beside] for key in beside[0][0]},
            "right": all(row["right"] for row in rows),
        }
    return out


# the report


def _better(case: dict[str, Any], key: str, names: Sequence[str] = NCCLS) -> float:
    """NCCL's time, the best of its ways."""
    return min(float(statistics.median(case["variants"][name][key])) for name in names)


def tables(results: dict[str, Any]) -> list[Table]:
    """One table for each mode."""
    found: dict[str, Table] = {}
    for title, case in results["cases"].items():
        name, mode = title.rsplit(", ", 1)
        table = found.setdefault(
            mode,
            Table(
                f"{mode[0].upper()}{mode[1:]} (ms; x is NCCL's time over this one)",
                (
                    "collective",
                    "calls",
                    "by",
                    "one call alone",
                    "x",
                    "all calls beside",
                    "GEMMs alone",
                    "beside",
                    "both",
                    "x",
                    "right",
                ),
            ),
        )
        for variant, row in case["variants"].items():
            alone, both = (_better(case, key) / statistics.median(row[key]) for key in ("alone", "both"))
            table.add(
                name, str(case["num_calls"]), variant, spread(row["alone"], digits=3), f"{alone:.2f}", spread(row["transfer"]),
                spread(case["GEMMs alone"]), spread(row["GEMMs"]), spread(row["both"]), f"{both:.2f}", str(row["right"]),
            )  # fmt: skip
    return list(found.values())


def targets(results: dict[str, Any]) -> Table:
    """What was wanted at 64 MB and up, beside what was measured.

    Alone, one collective after another on both sides; beside products, the best way of each side.
    """
    table = Table(
        "Targets, 64 MB and up",
        (
            "collective", "alone: best by", "of NCCL's time, one group (wanted: at most 1.1)", "met", "beside: best by",
            "NCCL's time, one group, over it", "NCCL's best time over it (wanted: at least 1.15)", "met",
        ),
    )  # fmt: skip
    for title, case in results["cases"].items():
        if int(title.split()[1]) < 64:
            continue
        rows = {name: row for name, row in case["variants"].items() if name not in NCCLS}
        single = [name for name in rows if not name.endswith(("lanes", "coalesced"))]
        first = min(single, key=lambda name: statistics.median(rows[name]["alone"]))
        best = min(rows, key=lambda name: statistics.median(rows[name]["both"]))
        alone = statistics.median(rows[first]["alone"]) / _better(case, "alone", NCCLS[:2])
        both = statistics.median(rows[best]["both"])
        over_one, over_best = _better(case, "both", NCCLS[:2]) / both, _better(case, "both") / both
        table.add(
            title, first, f"{alone:.2f}", "yes" if alone <= 1.1 else "NO", best, f"{over_one:.2f}", f"{over_best:.2f}",
            "yes" if over_best >= 1.15 else "NO",
        )  # fmt: skip
    return table


def report(path: Path) -> None:
    """Writes the report of a file that `run` wrote."""
    results = json.loads(path.read_text())
    machine = results["machine"]
    gpus = f"{len(machine['gpus'])} x {machine['gpus'][0]}"
    text = "\n\n".join(table.markdown() for table in [*tables(results), targets(results)])
    head = f"# Collectives by copy engines\n\n{gpus}; {machine['text']}; {machine['driver']}. {today()}.\n\n{__doc__}"
    failed = f"\n\nThe run broke off:\n\n```\n{results['failed']}\n```" if results["failed"] else ""
    slug = gpus.lower().replace(" x ", "-").replace(" ", "-")
    print(write_report("peer_collectives", Machine(slug, "", "", ""), f"{head}\n{text}{failed}\n"))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]))
    else:
        report(Path(sys.argv[2]))
