"""Two halves of a batch against the whole batch: by hand and by crossfade, in turns in one run, on 2 GPUs.

``python -m benchmarks.batches run OUT [--limit-s 540] [--cases 0,1,2,3] [--report] [--quick] [--profile]`` runs each case in
processes of its own, which are ended at the case's time limit: what they have written counts. ``--random 20`` runs so many random
models and shapes instead, in one pair of processes, and counts where the way that crossfade chose is within 2 % of the best one.
``python -m benchmarks.batches tell OUT`` makes the table again of what is in a folder. ``--quick`` is a trial of this program on a
CPU. ``--profile`` writes, in place of the table, how long the host takes to launch a step of each side, and files with the calls
that take its time. ``--no-peers`` has no peer access on any side: bytes go through the host's memory. ``--zeros`` has weights and
inputs of zeros, which take less power: what is slower than in turns then is so by contention.

Sides: the module as it is (``one batch``); two halves by hand, by NCCL and by copy engines; crossfade after its calibration, and
made to take either way. They take turns in an order that is drawn anew for each round, in blocks of 1 s (0.3 for random models):
a GPU begins a block idle, with a step that waits for its launches, and at its power limit its clock takes a third of a second to
follow. A figure is the median over rounds of the slowest rank's time of a step, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.batches_models import CASES, QUICK, Case, random_cases
from benchmarks.batches_sides import MAX_CTAS, NO_PEERS, SHORT_BLOCK_MS, ZEROS, work
from benchmarks.common import Table, this_machine, today, write_report

IN_A_HANDLE = "crossfade, one batch"
"""Of random captured calls: what a handle costs, which copies its input, is not what choosing an interleaved way costs."""
SIDES = [
    "one batch",
    "halves, NCCL",
    f"halves, NCCL of {MAX_CTAS} blocks",
    "halves, copies",
    "crossfade",
    IN_A_HANDLE,
    "crossfade, process groups",
    "crossfade, copy engines",
]


PROFILED = [side for side in SIDES if side not in ("crossfade", f"halves, NCCL of {MAX_CTAS} blocks")]
"""Sides that take one way each."""


def sides_of(case: Case, *, profiles: bool = False) -> list[str]:
    """A backward by hand is what autograd makes of the module: those sides are crossfade's, as all are of random cases."""
    own_only = case.trains or case.is_random
    sides = [side for side in SIDES if not (own_only and side.startswith("halves"))]
    if not (case.is_random and case.captured and not case.trains):  # a training's one batch is in a handle anyway
        sides.remove(IN_A_HANDLE)
    return [side for side in sides if not profiles or side in PROFILED]


def run_cases(
    cases: Sequence[Case],
    num_ranks: int,
    device: str,
    folder: Path,
    limit_s: float,
    *,
    profiles: bool = False,
    block_ms: float = SHORT_BLOCK_MS,
) -> str:
    """Runs cases in one process a rank; gives what went wrong, or nothing."""
    name = cases[0].name.replace(", ", "_").replace(" ", "-")
    out, store = folder / f"{name}.jsonl", folder / f"{name}.store"
    for path in (out, store):
        path.unlink(missing_ok=True)
    end_s = time.time() + limit_s * 0.75
    context = mp.get_context("spawn")
    names = [case.name for case in cases]
    args = (num_ranks, device, str(store), names, str(out), end_s, limit_s, profiles, block_ms)
    processes = [context.Process(target=_work, args=(rank, *args), daemon=True) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + limit_s
    said = ""
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.2)
        failed = [process.exitcode for process in processes if process.exitcode]
        if failed or time.monotonic() > deadline_s:
            said = f"a rank ended with {failed[0]}" if failed else f"it was ended after {limit_s:.0f} s"
            for process in processes:
                process.kill()
            break
    for process in processes:
        process.join()
    store.unlink(missing_ok=True)
    return said


def _work(
    rank: int,
    num_ranks: int,
    device: str,
    store: str,
    names: list[str],
    out: str,
    end_s: float,
    limit_s: float,
    profiles: bool,
    block_ms: float,
) -> None:
    known = {each.name: each for each in [*CASES, *QUICK]} | {each.name: each for each in random_cases(device)}
    cases = [known[name] for name in names]
    with Path(out).with_suffix(f".rank{rank}.stack").open("w") as stack:
        # Where a rank stands that is about to be ended.
        faulthandler.dump_traceback_later(max(1.0, limit_s - 5), file=stack)
        try:
            work(rank, num_ranks, device, store, cases, sides_of, out, end_s, profiles=profiles, block_ms=block_ms)
        except BaseException as error:
            said = {
                "failed": f"rank {rank}: {type(error).__name__}: {error}",
                "traceback": traceback.format_exc()[-3000:],
            }
            with Path(out).open("a") as file:
                file.write(json.dumps({"case": names[0], **said}) + "\n")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines that the ranks wrote, in their order."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Medians, how many times as fast as one batch, and crossfade over the fastest other side, by hand or made to take its way."""
    sides = [side for side in SIDES if any(row.get("side") == side for row in rows)]
    made = Table("Ways of a step (ms)", ["case", *sides, "x of one batch", "of the fastest other", "chose", "values"])
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        times, chose = _times_of(rows, case)
        medians = {side: statistics.median(taken) for side, taken in times.items() if taken}
        ours, single = medians.get("crossfade"), medians.get("one batch")
        best = min((medians[side] for side in sides if side in medians and side != "crossfade"), default=None)
        checks = [row["is_right"] for row in own if "is_right" in row]
        failed = [row["failed"].splitlines()[0] for row in own if "failed" in row]
        made.add(
            case,
            *(_cell(times[side]) for side in sides),
            f"{single / ours:.3f}" if ours and single else "",
            f"{best / ours:.3f}" if ours and best else "",
            chose,
            failed[0][:80] if failed else f"{sum(checks)} of {len(checks)} right",
        )
    return made


def num_right(rows: Sequence[dict[str, Any]]) -> str:
    """How often the chosen way is within 2 % of the best one; and how often crossfade's own time is.

    Ways are compared as the handle has them. An interleaved one has the blocks of both sides that take it, the one that was made to
    and the one that chose it, and so has one batch where it is captured. An eager one has the module's own blocks. The choice may
    change from round to round, with the speed of the host: each round counts for what was chosen in it. crossfade's own time is
    compared with that of the module without a handle too.
    """
    chosen, own = list[bool](), list[bool]()
    for case in dict.fromkeys(row["case"] for row in rows):
        times, _ = _times_of(rows, case)
        single = IN_A_HANDLE if times[IN_A_HANDLE] else "one batch"
        blocks = {
            side: {
                row["round"]: [row["ms"]]
                for row in rows
                if row["case"] == case and row.get("side") == side and "ms" in row
            }
            for side in (single, *SIDES[-2:])
        }
        taken = list[float]()
        for row in rows:
            if row["case"] != case or row.get("side") != "crossfade" or "ms" not in row:
                continue
            way = row["way"].removesuffix(", captured")
            block = blocks[single if way == "one batch" else f"crossfade, {way}"].setdefault(row["round"], [])
            if "captured" in case and "captured" not in row["way"]:
                taken.append(row["ms"])
                continue
            if way != "one batch" or single == IN_A_HANDLE:
                block.append(row["ms"])
            taken += block
        if not taken:
            continue
        fastest_ms = min(_median([each for block in of_side.values() for each in block]) for of_side in blocks.values())
        chosen.append(_median(taken) <= 1.02 * fastest_ms)
        own.append(_median(times["crossfade"]) <= 1.02 * min(fastest_ms, _median(times["one batch"])))
    return (
        f"the chosen way is within 2 % of the best one in {sum(chosen)} of {len(chosen)} cases, "
        f"crossfade's own time in {sum(own)}"
    )


def _times_of(rows: Sequence[dict[str, Any]], case: str) -> tuple[dict[str, list[float]], str]:
    """Milliseconds of a step in each block, by side, and the way that crossfade chose."""
    own = [row for row in rows if row["case"] == case]
    times = {side: [row["ms"] for row in own if row.get("side") == side and "ms" in row] for side in SIDES}
    return times, next((row["way"] for row in reversed(own) if row.get("side") == "crossfade" and "way" in row), "")


def _median(taken: Sequence[float]) -> float:
    return statistics.median(taken) if taken else math.inf


def launches(rows: Sequence[dict[str, Any]]) -> Table:
    """How long the host takes to launch a step of each side while the device is idle: rank 0, the median over rounds, the lowest
    and the highest.
    """
    columns = ["case", "side", "launches (ms)", "of which the thread computes", "cudaMalloc a step"]
    made = Table("Launches of a step", columns)
    found: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "wall_ms" in row:
            found[row["case"], row["side"]].append(row)
    for key, own in found.items():
        num_allocations = statistics.mean(row["num_device_allocations"] for row in own)
        made.add(*key, *(_cell([row[name] for row in own]) for name in ("wall_ms", "cpu_ms")), f"{num_allocations:.1f}")
    return made


def _cell(taken: Sequence[float]) -> str:
    return f"{statistics.median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f})" if taken else ""


def text(rows: Sequence[dict[str, Any]], said: Sequence[str], command: str) -> str:
    """The report."""
    hardware = _hardware()
    lines = [f"# Two halves of a batch, {hardware}", "", f"`{command}`, {today()}, torch {torch.__version__}.", ""]
    if any("wall_ms" in row for row in rows):
        lines += [launches(rows).markdown(), ""]
    else:
        lines += [__doc__.split("\n\n")[-1].strip() if __doc__ else "", "", table(rows).markdown(), ""]
    lines += [f"- {each}" for each in said]
    for row in rows:
        if "traceback" in row:
            lines += ["", f"### {row['case']}: failed", "```text", row["traceback"], "```"]
    told = {row["case"]: row["report"] for row in rows if row.get("side") == "crossfade" and "report" in row}
    for case, report in told.items():  # the last one, where it was measured again
        lines += ["", f"### {case}", "```text", report, "```"]
    return "\n".join(lines) + "\n"


def _hardware() -> str:
    if not torch.cuda.is_available():
        return this_machine([]).hardware
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "tell"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-s", type=float, default=540, help="of the whole run")
    parser.add_argument("--case-limit-s", type=float, default=120, help="of each case")
    parser.add_argument(
        "--cases", default="", help="numbers of cases, from 0, with commas; all, if empty; of random ones too"
    )
    parser.add_argument("--random", type=int, default=0, help="so many random models and shapes instead")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small cases on a CPU")
    parser.add_argument("--profile", action="store_true", help="what the host does in a step of each side")
    parser.add_argument("--no-peers", action="store_true", help="without peer access")
    parser.add_argument("--zeros", action="store_true", help="weights and inputs are zeros, below the power limit")
    parser.add_argument("--block-ms", type=float, help="of a block; 1000 on GPUs, 300 of random models and on a CPU")
    parser.add_argument("--report", action="store_true", help="write into benchmarks/reports too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.no_peers:
        os.environ[NO_PEERS] = "1"
    if options.zeros:
        os.environ[ZEROS] = "1"
    device = "cpu" if options.quick or not torch.cuda.is_available() else "cuda"
    block_ms = options.block_ms or (SHORT_BLOCK_MS if options.random or device == "cpu" else 1000.0)
    said, end_s = list[str](), time.monotonic() + options.limit_s
    cases = random_cases(device, options.random) if options.random else QUICK if options.quick else CASES
    if options.cases:
        cases = [cases[int(number)] for number in options.cases.split(",")]
    runs = [cases] if options.random else [[case] for case in cases]
    for run in runs if options.action == "run" else []:
        left_s = end_s - time.monotonic()
        if left_s < 20:
            said.append(f"{run[0].name}: there was no time left")
            continue
        limit_s = left_s if options.random else min(options.case_limit_s, left_s)
        failed = run_cases(
            run, options.ranks, device, options.out, limit_s, profiles=options.profile, block_ms=block_ms
        )
        if failed:
            said.append(f"{run[0].name}: {failed}")
        shown = launches if options.profile else table
        print(shown(read(options.out)).markdown(), *said, sep="\n", flush=True)
    flags = [
        f"--{name.replace('_', '-')}" for name in ("quick", "profile", "no_peers", "zeros") if getattr(options, name)
    ]
    flags += [
        f"--{name.replace('_', '-')} {value}"
        for name in ("cases", "random", "block_ms")
        if (value := getattr(options, name))
    ]
    if options.random:
        said.append(num_right(read(options.out)))
    command = ["python -m benchmarks.batches run OUT", *flags]
    page = text(read(options.out), said, " ".join(command))
    (options.out / "report.md").write_text(page)
    print(page)
    if options.report:
        machine = this_machine([])
        if device == "cuda":
            name = f"{options.ranks}-{torch.cuda.get_device_name(0).lower().replace(' ', '-').split('-80gb')[0]}"
            machine = type(machine)(name, machine.cpu_model, machine.kernel, machine.versions)
        print(write_report("batches_launches" if options.profile else "batches", machine, page))


if __name__ == "__main__":
    main()
