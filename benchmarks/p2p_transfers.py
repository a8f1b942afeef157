"""Tagged transfers of one pair of ranks beside gloo's, or beside NCCL's and the bare copies that are their limit.

``python -m benchmarks.p2p_transfers run OUT.json`` measures and writes after each step: on two GPUs where they are, on the CPU
otherwise, or with ``--cpu``; with ``--shared`` both ranks take one GPU, only to try it out (without NCCL, which refuses that).
``--only STEP ...`` for some steps, ``--quick`` for short blocks, ``--rounds`` for more blocks than five.
``python -m benchmarks.p2p_transfers report OUT.json ...`` makes a report of one run or several of the same machine, anywhere.

Each step is a pair of processes of its own with a time limit: what hangs loses the sizes that it has not come to. In a step the
sides take turns block by block; ratios are medians of the ratios of such neighbours, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import this_machine

if TYPE_CHECKING:
    from benchmarks.p2p_pair import Step

KB, MB = 1 << 10, 1 << 20
CPU_SIZES = (4, 64, KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
GPU_SIZES = (4 * KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
NO_PEERS = (("NCCL_P2P_DISABLE", "1"),)


def cpu_steps() -> list[Step]:
    from benchmarks.p2p_pair import Step

    sides = ("crossfade", "crossfade, backend", "gloo")
    limit_s = 400.0  # beside others, many blocks are repeated
    acts = ("send", "isend", "out and back", "both directions", "batch")
    steps = [Step(f"CPU, {act}", sides, (act,), CPU_SIZES, limit_s=limit_s) for act in acts]
    tags = ("ten tags in order", "ten tags in reverse")
    steps.append(Step("CPU, tags", ("crossfade", "gloo"), tags, tuple(size for size in CPU_SIZES if size <= 4 * MB)))
    steps.append(Step("CPU, beside", ("crossfade", "gloo"), (), (4 * MB,), loads=("products", "ViT", "all-reduces")))
    return steps


def gpu_steps() -> list[Step]:
    """With peer access, and without."""
    from benchmarks.p2p_pair import Step

    tags = ("ten tags in order", "ten tags in reverse")
    large, loads = (64 * MB, 256 * MB), ("products", "ViT", "all-reduces")
    found: list[Step] = []
    for where, own, limit, environment in (
        ("peer access", "copies", "bare copy", ()),
        ("no peer access", "staged", "pinned copy", NO_PEERS),
    ):
        one_way, both = (own, "NCCL", limit), (own, "NCCL", *(["bare copy"] if limit == "bare copy" else []))
        ahead = ("copies, streams wait",) if own == "copies" else ()
        calls = (*both, "crossfade, backend") if own == "copies" else both
        sets: list[tuple[str, tuple[str, ...], tuple[str, ...], tuple[int, ...], dict[str, Any]]] = [
            ("ahead", one_way, ("send",), GPU_SIZES, {"is_ahead": True}),
            ("hosts wait", (*one_way, *ahead), ("send",), GPU_SIZES, {}),
            ("both directions, ahead", both, ("both directions",), GPU_SIZES, {"is_ahead": True}),
            ("both directions, hosts wait", both, ("both directions",), GPU_SIZES, {}),
            ("calls", calls, ("send", "isend", "batch", "out and back"), (4 * KB, MB, 64 * MB), {}),
            ("tags", (own, *ahead), tags, (4 * KB, MB, 16 * MB), {"is_ahead": True}),
            ("beside", one_way, (), large, {"loads": loads}),
            ("three beside", one_way, (), large, {"loads": ("products",), "num_beside": 3}),
        ]
        found += [
            Step(f"{where}, {name}", sides, acts, sizes, environment=environment, **more)
            for name, sides, acts, sizes, more in sets
        ]
    return found


def run_step(step: Step, device: str, *, is_shared: bool, options: dict[str, Any]) -> dict[str, Any]:
    """What a step measured until it was done, failed, or was out of time."""
    from dataclasses import replace

    from benchmarks.p2p_pair import work
    from tests.helpers.device_pair import run_workers

    if is_shared:
        step = replace(step, sides=tuple(side for side in step.sides if side != "NCCL"))
    begin_s, failed = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="p2p-transfers-") as folder:
        args = [(rank, step, folder, device, is_shared, options) for rank in range(2)]
        try:
            run_workers([work, work], args, timeout_s=options.get("limit_s") or step.limit_s)
        except Exception:
            failed = traceback.format_exc()[-3000:]
        path = Path(folder, "results.json")
        results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"sizes": {}}
    return {**results, "sides": step.sides, "failed": failed, "taken_s": time.monotonic() - begin_s}


def run(path: Path, options: argparse.Namespace) -> None:
    """Measures, step by step; a step that fails leaves its error, and the others go on."""
    import torch

    device = "cpu" if options.cpu or not torch.cuda.is_available() else "cuda"
    if device == "cuda" and torch.cuda.device_count() < 2 and not options.shared:
        raise SystemExit("there is one GPU: --shared tries the program out on it, and --cpu measures on the CPU")
    machine: dict[str, Any] = {"text": str(this_machine(("torch", "cuda-bindings", "numpy"))), "gpus": []}
    machine["hardware"] = this_machine(()).hardware
    if device == "cuda":
        from benchmarks.device_copies import _gpus

        machine |= _gpus()
    steps = cpu_steps() if device == "cpu" else gpu_steps()
    results: dict[str, Any] = {"machine": machine, "is_shared": options.shared, "steps": {}}
    chosen = {"rounds": options.rounds, "quick": options.quick, "batch": options.batch, "limit_s": options.limit_s}
    for step in steps:
        if options.only and not any(word in step.name for word in options.only):
            continue
        result = results["steps"][step.name] = run_step(step, device, is_shared=options.shared, options=chosen)
        print(f"{step.name}: {result['taken_s']:.1f} s", result["failed"], flush=True)
        path.write_text(json.dumps(results))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.p2p_transfers", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure, and write OUT.json")
    measure.add_argument("out", type=Path)
    measure.add_argument("--cpu", action="store_true", help="on the CPU, GPUs or not")
    measure.add_argument("--shared", action="store_true", help="both ranks on one GPU: a trial")
    measure.add_argument("--quick", action="store_true", help="short blocks: a trial")
    measure.add_argument("--rounds", type=int, default=5, help="blocks of each side")
    measure.add_argument("--batch", type=int, default=32, help="images of a forward pass")
    measure.add_argument("--only", nargs="+", default=[], metavar="STEP", help="steps whose names contain one of these")
    measure.add_argument("--limit-s", type=float, default=0.0, help="of each step, instead of its own")
    tell = commands.add_parser("report", help="write a report of files that run has written")
    tell.add_argument("outs", type=Path, nargs="+")
    tell.add_argument("--note", type=Path, help="Markdown that goes to the top of the report")
    options = parser.parse_args(arguments)
    if options.command == "run":
        run(options.out, options)
    else:
        from benchmarks.p2p_report import report

        print(report(options.outs, options.note, (__doc__ or "")))


if __name__ == "__main__":
    main()
