"""A model in DDP with all-gathers in its forward, trained on two batches a step: on two streams as people try it, and by crossfade.

``torchrun --nproc-per-node 2 -m benchmarks.batches_ddp OUT [--seconds 40]``. Rank 0 writes OUT/report.md. The sides run in turns:
both batches on one stream; on two streams, one batch's forward launched after the other's; ``crossfade.interleaved`` after its
calibration, and made to take either way. Gradients of each side are compared with those of the first, and between ranks. Then a few
steps of the two streams and of crossfade are recorded, and what ``crossfade doctor`` says of them stands in the report. Without a
GPU it is a trial of this program: sizes are small, and there is nothing for the doctor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import crossfade
from benchmarks.batches_sides import LIMIT, block_ms, difference, join_torchrun, slowest
from benchmarks.common import Table, today
from crossfade.batches import InterleavedSteps

Step = Callable[[], None]
all_gather: Callable[[Tensor], tuple[Tensor, ...]] = torch.distributed.nn.functional.all_gather
_cuda: Any = torch.cuda
NUM_LAYERS = 6
SERIAL, STREAMS = "one stream", "two streams"
WAYS = {"crossfade": None, "crossfade, process groups": "process groups", "crossfade, copy engines": "copy engines"}


class Block(nn.Module):
    """A perceptron whose input is normalised over the rows of all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(torch.cat(all_gather(x)), 0)
        y: Tensor = self.down(torch.relu(self.up((x - mean) * torch.rsqrt(variance + 1e-3))))
        return x + y


class Bench:
    """The model, two batches of a rank, and the sides that train it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        width, num_rows = (2048, 16384) if device.type == "cuda" else (64, 64)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with device:
            inner = nn.Sequential(*(Block(width) for _ in range(NUM_LAYERS))).to(dtype)
        self.model = DistributedDataParallel(inner)
        torch.manual_seed(1 + dist.get_rank())
        self.batches = torch.randn(2, num_rows, width, device=device, dtype=dtype).unbind()
        self._streams: list[Any] = [_cuda.Stream() for _ in range(2)] if device.type == "cuda" else [None, None]

    def loss_of(self, rows: Tensor) -> Tensor:
        loss: Tensor = (self.model(rows) - rows).float().square().mean()
        return loss

    def one_stream(self) -> None:
        self.model.zero_grad(set_to_none=True)
        losses = [self.loss_of(rows) for rows in self.batches]
        torch.autograd.backward(torch.stack(losses).mean())

    def two_streams(self) -> None:
        self.model.zero_grad(set_to_none=True)
        losses = list[Tensor]()
        for stream, rows in zip(self._streams, self.batches, strict=True):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                losses.append(self.loss_of(rows))
        for stream in self._streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        torch.autograd.backward(torch.stack(losses).mean())

    def interleaved(self, steps: InterleavedSteps) -> Step:
        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            with steps as run:
                for rows in self.batches:
                    run(self.loss_of, rows, weight=len(rows))
                run.backward()

        return step

    def gradients(self) -> list[Tensor]:
        return [each.grad.clone() for each in self.model.parameters() if each.grad is not None]


def is_same_everywhere(gradients: list[Tensor]) -> bool:
    """Whether all ranks have these very gradients."""
    is_same = True
    for each in gradients:
        first = each.clone()
        dist.broadcast(first, 0)
        is_same &= torch.equal(each, first)
    return not slowest(float(not is_same), gradients[0].device.type)


def diagnosis(name: str, step: Step, out: Path) -> str:
    """What the doctor says of a few recorded steps, on rank 0."""
    folder = out / name.replace(", ", "_").replace(" ", "-")
    with crossfade.record(folder, untraced_steps=8) as recording:
        for _ in range(12):
            step()
            recording.step()
    dist.barrier()
    if dist.get_rank():
        return ""
    command = [sys.executable, "-m", "crossfade", "doctor", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "150"})
    return (run.stdout + run.stderr).strip()


def measure(bench: Bench, seconds: float) -> tuple[Table, str]:
    """All sides in turns; gives their table, and crossfade's report."""
    handles = {name: crossfade.interleaved(way=way) for name, way in WAYS.items()}
    sides: dict[str, Step] = {SERIAL: bench.one_stream, STREAMS: bench.two_streams}
    sides |= {name: bench.interleaved(handle) for name, handle in handles.items()}
    wanted, checks = list[Tensor](), dict[str, tuple[bool, float]]()
    for name, step in sides.items():
        for _ in range(14 if name == "crossfade" else 3):  # a calibration has twelve steps
            step()
        ours = bench.gradients()
        wanted = wanted or ours
        error = max(difference(one, other) for one, other in zip(ours, wanted, strict=True))
        checks[name] = is_same_everywhere(ours), slowest(error, bench.device.type)
    num = max(2, min(10, round(300 / block_ms(bench.one_stream, 2, bench.device.type))))
    taken: dict[str, list[float]] = {name: [] for name in sides}
    end_s = slowest(time.time(), bench.device.type) + seconds
    while slowest(time.time(), bench.device.type) < end_s:
        for name, step in sides.items():
            taken[name].append(block_ms(step, num, bench.device.type))
    table = Table(
        f"A step, in blocks of {num} (ms)",
        ["side", "median (lowest to highest)", "x of one stream", "equal on all ranks", "off one stream's gradients"],
    )
    serial = statistics.median(taken[SERIAL])
    for name, (is_same, error) in checks.items():
        median = statistics.median(taken[name])
        cell = f"{median:.2f} ({min(taken[name]):.2f} to {max(taken[name]):.2f})"
        table.add(
            name, cell, f"{serial / median:.3f}", "yes" if is_same else "NO", f"{error:.4f}" + " NO" * (error > LIMIT)
        )
    return table, str(handles["crossfade"].report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=40, help="of the blocks in turns")
    options = parser.parse_args()
    device, hardware = join_torchrun()
    rank = dist.get_rank()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(device)
    table, report = measure(bench, options.seconds)
    lines = [f"# A model in DDP with all-gathers in its forward, {hardware}, torch {torch.__version__}, {today()}", ""]
    lines += [table.markdown(), "", "```text", report, "```"]

    def write() -> None:
        if rank == 0:
            (options.out / "report.md").write_text("\n".join(lines) + "\n")

    write()  # a recording that fails loses none of it
    if device.type == "cuda":
        chosen = bench.interleaved(crossfade.interleaved(way="process groups"))
        for name, step in ((STREAMS, bench.two_streams), ("crossfade, process groups", chosen)):
            lines += ["", f"## What the doctor says of {name}", "```text", diagnosis(name, step, options.out), "```"]
            write()
    if rank == 0:
        print((options.out / "report.md").read_text(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
