"""A matrix product and communication of one's own, on each group of rows while the rest is computed. Needs the extra ``torch``.

::

    python examples/signaled_product.py [--ranks 2] [--rows 1024]

Every rank multiplies its part of the inner dimension, and the ranks need the sum. Instead of all-reducing the whole product at its
end, a callback all-reduces each group of rows when it is done, by torch.distributed as ever. Ranks have a GPU each (NCCL) where
there are enough, else they are on the CPU (gloo). NCCL has a group of its own for it, whose kernels fit beside the product.

The result is held against the plain product of the unsplit matrices; the program exits with 1 where they differ by more than
rounding does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossfade.ops import matmul_signaled
from crossfade.ops.signaled.sides import RowGroup

COLUMNS, DEPTH = 256, 512
NUM_GROUPS, NUM_SMS = 8, 16
"""Groups of rows, and the SMs that the product leaves to NCCL."""
LIMIT = 0.02
"""Of the largest element: bfloat16 has 8 bits, and sums of several ranks are rounded several times."""


def small_kernels() -> dist.ProcessGroup | None:
    """A group of all ranks whose NCCL kernels find room while the product runs; else they would wait for its end.

    Such a kernel begins when all of its blocks can, so it has no more of them than there are SMs left; and none in clusters, which
    need neighbouring SMs.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = NUM_SMS
    options.config.cga_cluster_size = 0
    group: dist.ProcessGroup | None = dist.new_group(pg_options=options)
    return group


def summed_product(a: Tensor, b: Tensor, ranks: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """The sum over ranks of ``a @ b``, and in how many groups it was communicated."""
    works: list[Any] = []

    def on_group(group: RowGroup) -> None:
        works.append(dist.all_reduce(group.tensor, group=ranks, async_op=True))  # the stream waits for this group alone

    out = matmul_signaled(a, b, on_group=on_group, group_rows=len(a) // NUM_GROUPS, reserve_sms=NUM_SMS)
    for work in works:
        work.wait()  # on a GPU that holds the stream, and not the host
    return out, len(works)


def run(rank: int, num_ranks: int, num_rows: int, folder: str) -> None:
    """What each process does."""
    has_gpus = torch.cuda.device_count() >= num_ranks
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend, meeting = "nccl" if has_gpus else "gloo", f"file://{Path(folder) / 'store'}"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_ranks)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator) for shape in ((num_rows, DEPTH), (DEPTH, COLUMNS)))
    part = slice(rank * DEPTH // num_ranks, (rank + 1) * DEPTH // num_ranks)
    own_a, own_b = (each.to(device, torch.bfloat16).contiguous() for each in (a[:, part], b[part]))
    ranks = small_kernels() if has_gpus else None
    summed_product(own_a, own_b, ranks)  # loads kernels and opens connections
    out, num_groups = summed_product(own_a, own_b, ranks)
    wanted = a @ b
    difference = float((out.float().cpu() - wanted).abs().max() / wanted.abs().max())
    if rank == 0:
        print(f"{num_ranks} ranks on {device.type}, {num_groups} groups of rows, each all-reduced when it was done")
        print(f"the sum differs from the plain product by {difference:.1e} of its largest element")
    dist.destroy_process_group()
    if difference > LIMIT:
        raise SystemExit(1)


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks; 1 if one of them found a difference."""
    parser = argparse.ArgumentParser(
        description="A product whose groups of rows are all-reduced while the rest is computed."
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--rows", type=int, default=1024, help="rows of the product")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    start = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(target=run, args=(rank, options.ranks, options.rows, folder)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
