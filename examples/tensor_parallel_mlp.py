"""A block of a transformer whose linear layers are split over ranks, and trained beside the unsplit one. Needs the extra ``torch``.

::

    python examples/tensor_parallel_mlp.py [--ranks 2] [--steps 10] [--candidate rounds]

`parallelize` replaces the block's layers by this rank's shards of them; between the layers, norms included, every rank has a part
of the sequence. Each product hides its communication: gathering in front of the first layer, summing behind the second, and the
mirror image of both in the backward pass. Ranks are processes with a GPU each where there are enough, else on the CPU.

The sums are added up in another order than in the unsplit block, so losses agree as nearly as float32 lets them, not bit for bit;
the program exits with 1 where they differ by more than 1e-4 of their size.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional

from crossfade.ops import parallelize, regions
from crossfade.peers import open_group

BATCH, LENGTH, WIDTH = 4, 48, 96
LIMIT = 1e-4
PLAN = {
    "norm": "sequence_parallel",
    "gate": "colwise",
    "up": "colwise",
    "down": "rowwise",
}


class Block(nn.Module):
    """Llama's MLP, with its norm and the way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


def work(rank: int, num_ranks: int, num_steps: int, candidate: str | None, folder: str) -> None:
    """One rank: trains both, and writes down their losses."""
    is_gpu = torch.cuda.device_count() >= num_ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    group = open_group(device=device)

    torch.manual_seed(0)  # the same on all ranks
    whole = Block().to(device)
    part = copy.deepcopy(whole)
    parallelize(part, PLAN, group, sequence_parallel=True, candidate=candidate, backward_candidate=candidate)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3) for module in (whole, part)]
    lines = []
    x, target = (torch.randn(BATCH, LENGTH, WIDTH, device=device) for _ in range(2))
    for _ in range(num_steps):
        split = part(regions.split(x, group, 1))
        losses = [functional.mse_loss(out, target) for out in (whole(x), regions.gather(split, group, 1))]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        lines.append(" ".join(f"{loss.item():.9g}" for loss in losses))
    Path(folder, f"losses of {rank}").write_text("\n".join(lines))
    group.close()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks, and compares; 1 if a loss differs."""
    parser = argparse.ArgumentParser(
        description="A block split over ranks inside its layers, trained beside the whole."
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2, help="processes")
    parser.add_argument("--steps", type=int, default=10, help="steps of training")
    parser.add_argument("--candidate", help="how products and communication are joined, such as 'plain' or 'rounds'")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps is at least 1")
    with tempfile.TemporaryDirectory() as folder:
        given = options.ranks, options.steps, options.candidate, folder
        torch.multiprocessing.spawn(work, given, nprocs=options.ranks)  # type: ignore[attr-defined,no-untyped-call,unused-ignore]
        told = [Path(folder, f"losses of {rank}").read_text() for rank in range(options.ranks)]
    pairs = [[float(loss) for loss in line.split()] for losses in told for line in losses.splitlines()]
    worst = max(abs(split - whole) / whole for whole, split in pairs)
    first, last = pairs[0], pairs[options.steps - 1]
    print(
        f"{options.ranks} ranks, {options.steps} steps: the split block's loss goes from {first[1]:.6f} to {last[1]:.6f}"
    )
    print(f"the unsplit block's differs by at most {worst:.1e} of its size")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
