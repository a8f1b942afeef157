"""Prefill of a tensor-parallel model whose all-reduces hide behind the other half of the batch: one line beside the model's own.

``torchrun --nproc-per-node 2 examples/torchrun_batches_prefill.py``, on GPUs, or on the CPU where there is none. The handle
measures first; on a CPU it may well find that the whole batch is faster, and leaves it so.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import crossfade

WIDTH, NUM_LAYERS, NUM_TOKENS = 64, 4, 32


class Block(nn.Module):
    """A layer as one writes it for one GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_LAYERS))).to(device)
    x = torch.randn(8, NUM_TOKENS, WIDTH, device=device)
    with torch.no_grad():
        wanted = model(x)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

        model_in_halves = crossfade.interleave(model)
        for _ in range(12):  # these measure
            model_in_halves(x)
        output = model_in_halves(x)

    is_right = torch.allclose(output, wanted, atol=1e-3)
    if dist.get_rank() == 0:
        print(model_in_halves.report())
        print(f"equal to the model on one device: {is_right}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
