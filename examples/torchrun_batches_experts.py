"""A mixture of experts spread over the ranks: one half-batch's all-to-all behind the other half's experts.

``torchrun --nproc-per-node 2 examples/torchrun_batches_experts.py``. Tokens choose their expert by themselves, so the parts of the
all-to-all differ in length from call to call; all ranks exchange those lengths first, as such layers do.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import crossfade

WIDTH, ROWS = 64, 96


class Experts(nn.Module):
    """One expert a rank; each token goes to the one that its router prefers, and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.expert = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        num_sent, num_received = sent.tolist(), received.tolist()
        tokens = x.new_empty(sum(num_received), WIDTH)
        dist.all_to_all_single(tokens, x[order], num_received, num_sent)
        back = torch.empty_like(x)
        dist.all_to_all_single(back, self.expert(tokens), num_sent, num_received)
        out = torch.empty_like(x)
        out[order] = back
        return x + out


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(Experts() for _ in range(3))).to(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.no_grad():
        wanted = model(x)
        in_halves = crossfade.interleave(model, way="process groups")
        output = in_halves(x)
    is_right = torch.tensor(float(torch.allclose(output, wanted, atol=1e-4)), device=device)
    dist.all_reduce(is_right)
    if dist.get_rank() == 0:
        print(in_halves.report())
        print(f"{is_right.item():g} of {dist.get_world_size()} ranks have the whole batch's output")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
