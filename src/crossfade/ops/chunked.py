"""Product and collective in pieces: torch.distributed moves a piece while the next one is computed.

::

    compute stream    mm piece 0 | mm piece 1            | mm piece 2            | wait for all
    NCCL's stream                 collective of piece 0  | collective of piece 1 | collective of piece 2

A piece of a reduce-scatter or all-gather has rows of every rank's block, so that it is a collective of its own; its rows lie in W
places, and one batched product computes them. A piece of an all-to-all is some columns, whatever the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from crossfade.ops import torch_collectives as collectives
from crossfade.ops.calls import whole
from crossfade.ops.job import Job
from crossfade.ops.pieces import cut_evenly
from crossfade.ops.products import multiply, multiply_all

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def reduce_scatter(job: Job, *, chunks: int) -> None:
    """See `matmul_reduce_scatter`."""
    num_ranks, columns = job.group.num_ranks, job.num_columns
    a = job.a.view(num_ranks, len(job.out), job.a.shape[1])
    pieces = [(begin, end, job.empty(num_ranks, end - begin, columns)) for begin, end in cut_evenly(a.shape[1], chunks)]
    works: list[Any] = []

    def begin_all() -> None:
        for begin, end, product in pieces:
            multiply_all(a[:, begin:end], job.b, product, job.bias)
            out = job.out[begin:end]
            works.append(collectives.reduce_scatter(job.group, out, product.flatten(0, 1), is_async=True))

    _in_two(job, begin_all, works)


def all_reduce(job: Job, *, chunks: int) -> None:
    """See `matmul_all_reduce`."""
    works: list[Any] = []

    def begin_all() -> None:
        for begin, end in cut_evenly(len(job.a), chunks):
            multiply(job.a[begin:end], job.b, job.out[begin:end], job.bias)
            works.append(collectives.all_reduce(job.group, job.out[begin:end], is_async=True))

    _in_two(job, begin_all, works)


def all_gather(job: Job, *, chunks: int) -> None:
    """See `all_gather_matmul`."""
    num_ranks, (rows, depth) = job.group.num_ranks, job.a.shape
    out = job.out.view(num_ranks, rows, job.num_columns)
    pieces = [(begin, end, job.empty(num_ranks, end - begin, depth)) for begin, end in cut_evenly(rows, chunks)]

    def body() -> None:
        works = [
            collectives.all_gather(job.group, part.flatten(0, 1), job.a[begin:end], is_async=True)
            for begin, end, part in pieces
        ]
        for work, (begin, end, part) in zip(works, pieces, strict=True):
            work.wait()
            multiply_all(part, job.b, out[:, begin:end], job.bias)
            if job.gathered is not None:
                job.gathered.view(num_ranks, rows, depth)[:, begin:end].copy_(part)

    whole(job, body)


def all_to_all(job: Job, *, chunks: int) -> None:
    """See `matmul_all_to_all`."""
    counts = job.counts
    assert counts is not None, "an all-to-all has counts"
    pieces = []
    for begin, end in cut_evenly(job.num_columns, chunks):
        pieces.append((begin, end, job.empty(len(job.a), end - begin), job.empty(len(job.out), end - begin)))

    def body() -> None:
        works: list[Any] = []
        for begin, end, product, arrived in pieces:
            bias = None if job.bias is None else job.bias[begin:end]
            multiply(job.a, job.b[:, begin:end], product, bias)
            arguments = (arrived, product, counts.received, counts.sent)
            works.append(collectives.all_to_all(job.group, *arguments, is_async=True))
        for work, (begin, end, _, arrived) in zip(works, pieces, strict=True):
            work.wait()
            job.out[:, begin:end].copy_(arrived)

    whole(job, body)


def _in_two(job: Job, begin_all: Callable[[], None], works: list[Any]) -> None:
    """Collectives, beside the last of which the caller's own work runs, if there is any."""
    whole(job, begin_all)
    job.fill()
    whole(job, partial(_await, works))


def _await(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()
