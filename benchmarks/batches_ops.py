"""Two halves of a batch in a module whose products are `crossfade.ops` operators, beside one that calls torch.distributed.

``torchrun --nproc-per-node 2 -m benchmarks.batches_ops OUT [--seconds 10]``. Rank 0 writes OUT/report.md. Both modules have the
same weights: a tensor-parallel stack whose sums over the ranks are all-reduces, or are done by ``matmul_all_reduce`` with the
product before them, as measured beforehand for whole batches and for halves. Each is run as it is and through
`crossfade.interleave`, which measures, and is made to take either way. Sides take turns in an order that is drawn anew for each
round; outputs are compared with the plain module's. Without a GPU it is a trial of this program.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossfade
from benchmarks.batches_models import Case, Stack, Transformer, transformer
from benchmarks.batches_sides import LIMIT, block_ms, difference, join_torchrun, settle, slowest
from benchmarks.common import Table, today
from crossfade.batches import Interleaved
from crossfade.ops import matmul_all_reduce, prepare

PLAIN = "torch.distributed"
OPERATORS = "operators"
WAYS = {"one batch": None, "crossfade": None, "process groups": "process groups", "copy engines": "copy engines"}
ON_GPU = [
    Case("2048 wide, 16k tokens", transformer(12, 2048, 8192), (8, 2048, 2048)),
    Case("4096 wide, 16k tokens", transformer(8, 4096, 14336), (16, 1024, 4096)),
]
ON_CPU = [Case("quick", transformer(3, 64, 128, 16), (8, 32, 64))]
Forward = Callable[[Tensor], Tensor]


class ByOperators(nn.Module):
    """The same layers; each sum is one operator with the product before it."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.layers = stack.layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, Transformer)
            for norm, half, last in layer.halves():
                x = x + matmul_all_reduce(half(norm(x)), last.weight.t())
        return x


def prepare_all(stack: Stack, num_tokens: int) -> list[str]:
    """Measures the operators of whole batches and of halves; gives what was chosen."""
    first: Any = stack.layers[0]
    said = list[str]()
    for rows in (num_tokens, num_tokens // 2):
        for _, _, last in first.halves():
            n, k = last.weight.shape
            dtype = last.weight.dtype
            on_gpu = last.weight.is_cuda
            chosen = prepare(matmul_all_reduce, m=rows, n=n, k=k, dtype=dtype, is_measured=on_gpu)
            said.append(f"[{rows}, {k}] x [{k}, {n}]: {chosen}")
    return said


class Bench:
    """Both modules and their sides."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(dist.get_rank())
        stack = case.make(dist.get_world_size(), device.type)
        self.chosen = prepare_all(stack, case.shape[0] * case.shape[1])
        modules: dict[str, nn.Module] = {PLAIN: stack, OPERATORS: ByOperators(stack)}
        self.sides: dict[str, Forward] = {}
        for name, module in modules.items():
            for way, asked in WAYS.items():
                if device.type == "cpu" and asked == "copy engines":
                    continue
                side = module if way == "one batch" else crossfade.interleave(module, way=asked)
                self.sides[f"{name}, {way}"] = side
        torch.manual_seed(1000)  # tensor parallelism: the input is the same on all ranks
        self.x = torch.randn(case.shape, device=device, dtype=next(stack.parameters()).dtype)

    def warm_up(self, side: Forward) -> Tensor:
        output = [side(self.x) for _ in range(4)][-1]
        while isinstance(side, Interleaved) and not side.report().is_settled:  # in one step on all ranks
            output = side(self.x)
        settle(self.device.type)
        return output

    def block_ms(self, side: Forward, num: int) -> float:
        return block_ms(partial(side, self.x), num, self.device.type)

    def measure(self, title: str, seconds: float) -> Table:
        """All sides in turns, and how far each is off the plain module."""
        wanted = self.warm_up(self.sides[f"{PLAIN}, one batch"]).clone()
        off = {
            name: slowest(difference(self.warm_up(side), wanted), self.device.type) for name, side in self.sides.items()
        }
        num = max(2, min(20, round(300 / self.block_ms(self.sides[f"{PLAIN}, one batch"], 2))))
        taken: dict[str, list[float]] = {name: [] for name in self.sides}
        draw, end_s = Random(0), slowest(time.time(), self.device.type) + seconds
        while slowest(time.time(), self.device.type) < end_s:
            for name in draw.sample(list(self.sides), len(self.sides)):
                taken[name].append(self.block_ms(self.sides[name], num))
        table = Table(
            f"{title}: a step, in blocks of {num} (ms)",
            ["side", "median (lowest to highest)", "x of one batch with torch.distributed", "chose", "off"],
        )
        serial = statistics.median(taken[f"{PLAIN}, one batch"])
        for name, blocks in taken.items():
            median, side = statistics.median(blocks), self.sides[name]
            cell = f"{median:.2f} ({min(blocks):.2f} to {max(blocks):.2f})"
            way = side.report().way if isinstance(side, Interleaved) else ""
            table.add(name, cell, f"{serial / median:.3f}", way, f"{off[name]:.4f}" + " NO" * (off[name] > LIMIT))
        return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=10, help="of each case's blocks in turns")
    options = parser.parse_args()
    device, hardware = join_torchrun()
    rank = dist.get_rank()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [f"# Halves of a batch behind operators, {hardware}, torch {torch.__version__}, {today()}"]
    with torch.inference_mode():
        for case in ON_GPU if device.type == "cuda" else ON_CPU:
            bench = Bench(case, device)
            lines += ["", bench.measure(case.name, options.seconds).markdown(), "", "Operators: "]
            lines += [f"- {each}" for each in bench.chosen]
            if rank == 0:
                (options.out / "report.md").write_text("\n".join(lines) + "\n")
            del bench
    if rank == 0:
        print((options.out / "report.md").read_text(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
