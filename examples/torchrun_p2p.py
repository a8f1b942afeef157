"""Attention over a sequence that is split between ranks: keys and values go around a ring while those before them are used.

``torchrun --nproc-per-node 2 examples/torchrun_p2p.py``. A rank sends on the keys and values that it has, and receives the next
ones, while it computes with those that it has (ring attention, Liu et al. 2023).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.p2p import P2P

ROWS, WIDTH = 256, 64


def ring_attention(query: Tensor, own: Tensor, p2p: P2P) -> Tensor:
    """Attention of ``query`` [rows, width] over the keys and values of all ranks; ``own``: this rank's, [2, rows, width]."""
    num_ranks, held = p2p.num_ranks, own
    after, before = (p2p.rank + 1) % num_ranks, (p2p.rank - 1) % num_ranks
    logs, outputs = [], []
    for step in range(num_ranks):
        is_last = step == num_ranks - 1
        coming = torch.empty_like(own)
        works = [] if is_last else [p2p.irecv(coming, src=before, tag=step), p2p.isend(held, dst=after, tag=step)]
        scores = query @ held[0].T / WIDTH**0.5
        logs.append(scores.logsumexp(-1, keepdim=True))
        outputs.append(scores.softmax(-1) @ held[1])
        for work in works:
            work.wait()
        held = coming
    weights = torch.stack(logs).softmax(0)
    return (weights * torch.stack(outputs)).sum(0)


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(1 + dist.get_rank())
    query, own = torch.randn(ROWS, WIDTH, device=device), torch.randn(2, ROWS, WIDTH, device=device)
    with P2P() as p2p:
        output = ring_attention(query, own, p2p)

    everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, own)
    keys, values = torch.cat(everywhere, dim=1)
    wanted = (query @ keys.T / WIDTH**0.5).softmax(-1) @ values
    num_right = torch.tensor(int(torch.allclose(output, wanted, atol=1e-4)), device=device)
    dist.all_reduce(num_right)
    if dist.get_rank() == 0:
        print(f"{num_right.item()} of {dist.get_world_size()} ranks have the attention over the whole sequence")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
