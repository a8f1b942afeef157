"""What a captured call takes through a handle of `crossfade.interleave`, beside its graph, and its graph with two copies.

``torchrun --nproc-per-node 1 -m benchmarks.batches_captured OUT`` (or with more ranks). Rank 0 writes OUT/report.md. The sides
run in turns, in rows of calls that follow one another. A row is timed on the GPU, and its calls on the host, which is ahead of the
GPU. What the handle gives is compared with what the module gives.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossfade
from benchmarks.batches_sides import join_torchrun
from benchmarks.common import Table, today

MODELS = ((6, 1024, 64), (12, 1024, 64), (12, 2048, 2048))
"""Blocks, width, rows."""
NUM_ROWS, NUM_CALLS = 15, 100
_cuda: Any = torch.cuda


class Block(nn.Module):
    """A perceptron whose output is summed over the ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        dist.all_reduce(y)
        return x + y


def sides_of(model: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    """The same call by a graph, by a graph with copies, and by a handle; checked against the module's."""
    wanted = model(x)
    own, graph = x.clone(), _cuda.CUDAGraph()
    torch.cuda.synchronize()
    with _cuda.graph(graph):
        out: Tensor = model(own)
    handle = crossfade.interleave(model, way="one batch", capture=True)

    def copied() -> Tensor:
        own.copy_(x)
        graph.replay()
        return out.clone()

    for call in (copied, lambda: handle(x), lambda: handle(x)):
        assert torch.allclose(call(), wanted, rtol=0.05, atol=0.05), "another output"
    assert handle.report().way == "one batch, captured"
    return {"graph": graph.replay, "graph and copies": copied, "handle": lambda: handle(x)}


def row_us(call: Callable[[], Any]) -> tuple[float, float]:
    """A call of a row: of the GPU, and of the host."""
    for _ in range(NUM_CALLS // 10):
        call()
    torch.cuda.synchronize()
    begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    begin.record()
    began_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    host_us = (time.perf_counter() - began_s) / NUM_CALLS * 1e6
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / NUM_CALLS * 1e3, host_us


def _said(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


@torch.no_grad()
def measure(device: torch.device) -> Table:
    table = Table("A call, in rows of 100 (us)", ["blocks, width, rows", "side", "GPU", "host"])
    for num_blocks, width, num_rows in MODELS:
        torch.manual_seed(3)
        model = nn.Sequential(*(Block(width) for _ in range(num_blocks))).to(device, torch.bfloat16)
        sides = sides_of(model, torch.randn(num_rows, width, device=device, dtype=torch.bfloat16))
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(NUM_ROWS):
            for name, call in sides.items():
                taken[name].append(row_us(call))
        for name, rows in taken.items():
            table.add(f"{num_blocks}, {width}, {num_rows}", name, *map(_said, map(list, zip(*rows, strict=True))))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    device, hardware = join_torchrun()
    if device.type != "cuda":
        raise SystemExit("CUDA graphs need a GPU")
    table = measure(device)
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        text = f"# Captured calls through a handle, {hardware}, torch {torch.__version__}, {today()}\n\n{table.markdown()}\n"
        (options.out / "report.md").write_text(text)
        print(text, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
