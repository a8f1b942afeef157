"""A matrix product split over the ranks of a torchrun program: one import, one call, and no set-up but torch.distributed's own.

``torchrun --nproc-per-node 2 examples/torchrun_product.py``, on GPUs linked by NVLink, or on the CPU where there is none.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from crossfade import ops, peers


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")

    torch.manual_seed(0)  # the whole layer, the same on all ranks
    x, weight = torch.randn(8, 64, device=device), torch.randn(32, 64, device=device)
    own = slice(rank * 64 // dist.get_world_size(), (rank + 1) * 64 // dist.get_world_size())

    y = ops.matmul_all_reduce(x[:, own].contiguous(), weight[:, own].t().contiguous())

    is_right = torch.allclose(y, x @ weight.t(), atol=1e-4)
    num_right = peers.all_reduce(torch.full((1,), float(is_right), device=device))
    if dist.get_rank() == 0:
        print(f"{num_right.item():g} of {dist.get_world_size()} ranks have the whole layer's output")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
