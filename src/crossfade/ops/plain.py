"""The product, then torch.distributed's collective (NCCL, gloo on a CPU): what all other candidates are measured against."""

from __future__ import annotations

from crossfade.ops import torch_collectives as collectives
from crossfade.ops.calls import whole
from crossfade.ops.job import Job
from crossfade.ops.products import multiply

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def reduce_scatter(job: Job) -> None:
    """See `matmul_reduce_scatter`."""
    product = job.empty(len(job.a), job.num_columns)

    def body() -> None:
        multiply(job.a, job.b, product, job.bias)
        collectives.reduce_scatter(job.group, job.out, product)

    whole(job, body)


def all_reduce(job: Job) -> None:
    """See `matmul_all_reduce`."""

    def body() -> None:
        multiply(job.a, job.b, job.out, job.bias)
        collectives.all_reduce(job.group, job.out)

    whole(job, body)


def all_gather(job: Job) -> None:
    """See `all_gather_matmul`."""
    gathered = job.gathered
    if gathered is None:
        gathered = job.empty(job.group.num_ranks * len(job.a), job.a.shape[1])

    def body() -> None:
        collectives.all_gather(job.group, gathered, job.a)
        multiply(gathered, job.b, job.out, job.bias)

    whole(job, body)


def all_to_all(job: Job) -> None:
    """See `matmul_all_to_all`."""
    counts = job.counts
    assert counts is not None, "an all-to-all has counts"
    product = job.empty(len(job.a), job.num_columns)

    def body() -> None:
        multiply(job.a, job.b, product, job.bias)
        collectives.all_to_all(job.group, job.out, product, counts.received, counts.sent)

    whole(job, body)
