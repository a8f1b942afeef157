"""Times each planted program with and without its cause, in turns, and records a plain trace of both.

::

    python -m benchmarks.doctor.run OUT                          # programs of one rank
    torchrun --nproc-per-node 2 -m benchmarks.doctor.run OUT     # all

Lines of ``OUT/results.jsonl`` come as programs end; traces lie beside it, ``NAME-SEED-cause-RANK.json.gz`` and ``...-fixed-...``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.doctor.programs import PROGRAMS, Planted, Sizes, Step

_NUM_WARM = 3
_NUM_TRACED = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, to try the program")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rank, num_ranks, device = _begin()
    first = args.out / f"first-{rank}.json.gz"
    _record(lambda: None, Sizes.of(0, device, is_small=True), first)  # the first one starts the profiler
    first.unlink()
    for seed in args.seeds:
        for planted in PROGRAMS:
            if planted.num_ranks > num_ranks or (args.only and planted.name not in args.only):
                continue
            sizes = Sizes.of(seed, device, is_small=args.small)
            try:
                result = _measure(planted, sizes, args.rounds, args.steps, seed, args.out, rank)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                result = {"name": planted.name, "seed": seed, "error": str(error)[:300]}
            gc.collect()
            if rank == 0:
                with (args.out / "results.jsonl").open("a") as file:
                    print(json.dumps(result), file=file)
                print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _begin() -> tuple[int, int, torch.device]:
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, num_ranks, device


def _measure(
    planted: Planted, sizes: Sizes, num_rounds: int, num_steps: int, seed: int, out: Path, rank: int
) -> dict[str, object]:
    steps: dict[str, Step] = {}
    for name, has_cause in (("cause", True), ("fixed", False)):
        torch.manual_seed(seed)
        steps[name] = planted.make(sizes, has_cause)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        _time(step, _NUM_WARM, sizes)
    for _ in range(num_rounds):
        for name, step in steps.items():
            times[name].append(_time(step, num_steps, sizes))
    traced = {
        name: _record(step, sizes, out / f"{planted.name}-{seed}-{name}-{rank}.json.gz") for name, step in steps.items()
    }
    with_cause, without = median(times["cause"]), median(times["fixed"])
    return {
        "name": planted.name,
        "seed": seed,
        "cause": planted.cause,
        "num_ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "step_ms": round(with_cause * 1e3, 4),
        "fixed_ms": round(without * 1e3, 4),
        "spread": [round(min(times["cause"]) / with_cause, 3), round(max(times["cause"]) / with_cause, 3)],
        "gain": round(1 - median(there / here for here, there in zip(times["cause"], times["fixed"], strict=True)), 4),
        "traced_ms": {name: round(length * 1e3, 4) for name, length in traced.items()},
    }


def _wait(sizes: Sizes) -> None:
    if sizes.device.type == "cuda":
        torch.cuda.synchronize()


def _time(step: Step, num: int, sizes: Sizes) -> float:
    """Seconds a step, steps running into each other as in a training loop."""
    _wait(sizes)
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    for _ in range(num):
        step()
    _wait(sizes)
    return (time.perf_counter() - begin) / num


def _record(step: Step, sizes: Sizes, path: Path) -> float:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (sizes.device.type == "cuda")
    with profile(activities=activities) as profiler:
        step()
        length = _time(step, _NUM_TRACED, sizes)
    profiler.export_chrome_trace(str(path))
    return length


if __name__ == "__main__":
    main()
