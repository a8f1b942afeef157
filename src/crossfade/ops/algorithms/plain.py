"""The product, then torch.distributed's collective (NCCL, gloo on a CPU): what all other candidates are measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfade.ops.calls import products as collectives
from crossfade.ops.calls.job import Job, whole
from crossfade.ops.calls.products import multiply


def reduce_scatter(job: Job) -> None:
    """See `matmul_reduce_scatter`."""
    product = job.empty(len(job.a), job.num_columns)

    def begin(*, is_async: bool) -> Any:
        multiply(job.a, job.b, product, job.bias)
        return collectives.reduce_scatter(job.group, job.out, product, is_async=is_async)

    _in_two(job, begin)


def all_reduce(job: Job) -> None:
    """See `matmul_all_reduce`."""

    def begin(*, is_async: bool) -> Any:
        multiply(job.a, job.b, job.out, job.bias)
        return collectives.all_reduce(job.group, job.out, is_async=is_async)

    _in_two(job, begin)


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


def all_to_all_first(job: Job) -> None:
    """See `crossfade.ops.forward.all_to_all_first`."""
    counts, rows = job.counts, job.gathered
    assert counts is not None, "an all-to-all has counts"
    if rows is None:
        rows = job.empty(len(job.out), job.a.shape[1])

    def body() -> None:
        collectives.all_to_all(job.group, rows, job.a, counts.received, counts.sent)
        multiply(rows, job.b, job.out, job.bias)

    whole(job, body)


def _in_two(job: Job, begin: Callable[..., Any]) -> None:
    """A product and its collective, beside which the caller's own work runs, if there is any."""
    if not job.fill:
        whole(job, lambda: begin(is_async=False))
        return
    works: list[Any] = []
    whole(job, lambda: works.append(begin(is_async=True)))
    job.fill()
    whole(job, lambda: works.pop().wait())
