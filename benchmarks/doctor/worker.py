"""One rank of a run: times programs and records their traces. ``run.py`` starts it.

::

    python -m benchmarks.doctor.worker OUT ROUNDS STEPS SMALL time:NAME:SEED ... record:NAME:SEED ...

Each rank runs some of the programs of one GPU, so two of them run at once. What is timed comes before what `crossfade.record`
records.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

import crossfade
from benchmarks.doctor.planted import Planted, Sizes, Step
from benchmarks.doctor.programs import PROGRAMS
from crossfade.host.processes import die_on_hangup

_NUM_WARM = 3
_NUM_TRACED = 5
_NUM_UNTRACED = 5  # before what `crossfade.record` traces
_ROUND_S = 0.2
_FEWEST_STEPS = 4  # of a round
_FEWEST_ROUNDS = 3  # so many are enough where they agree:
_ALIKE = 0.02  # within so much of the step, or
_ALIKE_SHARE = 0.2  # within so much of the gain
FILES = {"time": "results.jsonl", "record": "records.jsonl"}


def main() -> None:
    die_on_hangup(sys.stdin.fileno())  # with whoever has started it, and not in the midst of what is measured next
    out, num_rounds, num_steps, is_small = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    programs = {planted.name: planted for planted in PROGRAMS}
    rank, device = _begin()
    first = out / f"first-{rank}.json.gz"
    _record(lambda: None, Sizes.of(0, device, is_small=True), first, is_alone=True)  # the first one starts the profiler
    first.unlink()
    num_alone = 0
    for what, name, seed in (case.split(":") for case in sys.argv[5:]):
        planted, writer = programs[name], 0
        if planted.num_ranks == 1:
            writer = num_alone % int(os.environ["WORLD_SIZE"])
            num_alone += 1
            if writer != rank:
                continue
        sizes = Sizes.of(int(seed), device, is_small=bool(is_small))
        steps = _make(planted, sizes, int(seed))
        stem = f"{out / name}-{seed}"
        if what == "time":
            result = _measure(planted, steps, sizes, num_rounds, num_steps, stem, rank)
        else:
            result = _record_all(planted, steps, sizes, stem, rank)
        result = {"name": name, "seed": int(seed), **result}
        del steps
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rank == writer:
            with (out / FILES[what]).open("a") as file:
                print(json.dumps(result), file=file)
            print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _begin() -> tuple[int, torch.device]:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
    return rank, device


def _make(planted: Planted, sizes: Sizes, seed: int) -> dict[str, Step]:
    """The program with its cause and without, both run some times."""
    steps: dict[str, Step] = {}
    for name, has_cause in (("cause", True), ("fixed", False)):
        torch.manual_seed(seed)
        steps[name] = planted.make(sizes, has_cause)
    for step in steps.values():
        _time(step, _NUM_WARM, sizes, is_alone=planted.num_ranks == 1)
    return steps


def _measure(
    planted: Planted, steps: dict[str, Step], sizes: Sizes, num_rounds: int, num_steps: int, stem: str, rank: int
) -> dict[str, object]:
    is_alone = planted.num_ranks == 1
    times: dict[str, list[float]] = {name: [] for name in steps}
    usual = _of_first_rank(_time(steps["cause"], _NUM_WARM, sizes, is_alone=is_alone), sizes, is_alone=is_alone)
    num_steps = min(max(int(_ROUND_S / usual), _FEWEST_STEPS), num_steps)
    gains: list[float] = []
    while len(gains) < num_rounds and not (len(gains) >= _FEWEST_ROUNDS and _are_alike(gains)):
        for name, step in steps.items():
            times[name].append(_time(step, num_steps, sizes, is_alone=is_alone))
        gain = 1 - times["fixed"][-1] / times["cause"][-1]
        gains.append(_of_first_rank(gain, sizes, is_alone=is_alone))
    traced = {}
    for name, step in steps.items():
        traced[name] = _record(step, sizes, Path(f"{stem}-{name}-{rank}.json.gz"), is_alone=is_alone)
    with_cause, without = median(times["cause"]), median(times["fixed"])
    return {
        "cause": planted.cause,
        "num_ranks": 1 if is_alone else dist.get_world_size(),
        "step_ms": round(with_cause * 1e3, 4),
        "fixed_ms": round(without * 1e3, 4),
        "spread": [round(min(times["cause"]) / with_cause, 3), round(max(times["cause"]) / with_cause, 3)],
        "gain": round(median(gains), 4),
        "gains": [round(gain, 4) for gain in gains],
        "traced_ms": {name: round(length * 1e3, 4) for name, length in traced.items()},
    }


def _are_alike(gains: Sequence[float]) -> bool:
    return max(gains) - min(gains) <= max(_ALIKE, _ALIKE_SHARE * median(gains))


def _of_first_rank(value: float, sizes: Sizes, *, is_alone: bool) -> float:
    """The first rank's value, so that all ranks decide alike."""
    if is_alone:
        return value
    shared = torch.tensor([value], device=sizes.device, dtype=torch.float32)
    dist.broadcast(shared, 0)
    return float(shared.item())


def _record_all(planted: Planted, steps: dict[str, Step], sizes: Sizes, stem: str, rank: int) -> dict[str, object]:
    """The same traces by `crossfade.record`."""
    traced = {}
    for name, step in steps.items():
        with tempfile.TemporaryDirectory() as folder:
            with crossfade.record(folder, untraced_steps=_NUM_UNTRACED) as recording:
                for _ in range(_NUM_UNTRACED):
                    step()
                    recording.step()
                length = _traced_steps(step, recording.step, sizes, is_alone=planted.num_ranks == 1)
            assert recording.path is not None, "the block is over"
            shutil.copy(recording.path, f"{stem}-{name}.record-{rank}.json.gz")
        traced[name] = round(length * 1e3, 4)
    return {"traced_ms": traced}


def _wait(sizes: Sizes) -> None:
    if sizes.device.type == "cuda":
        torch.cuda.synchronize()


def _time(step: Step, num: int, sizes: Sizes, *, is_alone: bool) -> float:
    """Seconds a step, steps running into each other as in a training loop."""
    _wait(sizes)
    if not is_alone:
        dist.barrier()
    begin = time.perf_counter()
    for _ in range(num):
        step()
    _wait(sizes)
    return (time.perf_counter() - begin) / num


def _traced_steps(step: Step, end_step: Step, sizes: Sizes, *, is_alone: bool) -> float:
    """How long a step takes; each is followed by ``end_step``, as programs call it."""

    def whole() -> None:
        step()
        end_step()

    return _time(whole, _NUM_TRACED, sizes, is_alone=is_alone)


def _record(step: Step, sizes: Sizes, path: Path, *, is_alone: bool) -> float:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (sizes.device.type == "cuda")
    until_the_end = schedule(wait=0, warmup=0, active=_NUM_TRACED + 1)
    with profile(activities=activities, schedule=until_the_end, acc_events=True) as profiler:
        length = _traced_steps(step, profiler.step, sizes, is_alone=is_alone)
    profiler.export_chrome_trace(str(path))
    return length


if __name__ == "__main__":
    main()
