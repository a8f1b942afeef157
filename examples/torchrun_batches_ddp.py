"""A model in DDP with all-gathers in its forward (a contrastive loss over all ranks), trained on two batches a step.

``torchrun --nproc-per-node 2 examples/torchrun_batches_ddp.py``. By itself nothing can be computed during an all-gather. Two
batches in turns hide one's all-gathers behind the other's layers; DDP reduces gradients once, in one backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import crossfade

WIDTH, ROWS, STEPS = 64, 32, 14
all_gather: Callable[[Tensor], tuple[Tensor, ...]] = torch.distributed.nn.functional.all_gather


class Encoder(nn.Module):
    """Layers whose inputs are normalised over the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            everywhere = torch.cat(all_gather(x))
            x = torch.tanh(layer((x - everywhere.mean(0)) / (everywhere.std(0) + 1e-3)))
        return x


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder().to(device), device_ids=[rank] if device == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(rows: Tensor) -> Tensor:
        loss: Tensor = (model(rows) - rows).square().mean()
        return loss

    torch.manual_seed(1 + dist.get_rank())
    steps, losses = crossfade.interleaved(), []
    for _ in range(STEPS):
        first, second = torch.randn(2, ROWS, WIDTH, device=device)
        with steps as run:
            run(loss_of, first, weight=len(first))
            run(loss_of, second, weight=len(second))
            losses.append(run.backward())
        optimizer.step()
        optimizer.zero_grad()

    own = torch.cat([each.detach().flatten() for each in model.parameters()])
    first_rank = own.clone()
    dist.broadcast(first_rank, 0)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(steps.report())
        print(f"loss {losses[0].item():.3f}, then {losses[-1].item():.3f}; parameters equal on all ranks: ", end="")
        print(torch.equal(own, first_rank))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
