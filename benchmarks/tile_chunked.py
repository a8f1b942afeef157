"""A product and its collective in pieces, by torch alone: torch.distributed moves a piece while the next one is computed.

::

    compute stream    mm piece 0 | mm piece 1            | mm piece 2            | wait for all
    NCCL's stream                 collective of piece 0  | collective of piece 1 | collective of piece 2

A piece of a reduce-scatter or all-gather has rows of every rank's block, so that it is a collective of its own; its rows lie in W
places, and one batched product computes them. A piece of an all-to-all is some columns, whatever the counts. A baseline of
``benchmarks.tile_ops``: it won none of 59 rows (docs/decisions/0013-tile-operators.md), so it is no candidate of the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from crossfade.ops.calls.job import Operator
from crossfade.ops.calls.products import cut_evenly

__all__ = ["CHUNKED"]


def _named(*names: str) -> Any:
    """The first of torch.distributed's functions that there is."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _multiply_all(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``a`` is (W, M, K): one launch for rows that lie in W places."""
    torch.bmm(a, b.expand(len(a), *b.shape), out=out)


def reduce_scatter(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, chunks: int) -> torch.Tensor:
    """See `crossfade.ops.matmul_reduce_scatter`."""
    move = _named("reduce_scatter_single", "reduce_scatter_tensor")
    blocks = a.view(len(a) // len(out), len(out), a.shape[1])
    products, works = [], []
    for begin, end in cut_evenly(len(out), chunks):
        products.append(a.new_empty(len(blocks), end - begin, b.shape[1]))
        _multiply_all(blocks[:, begin:end], b, products[-1])
        works.append(move(out[begin:end], products[-1].flatten(0, 1), async_op=True))
    for work in works:
        work.wait()
    return out


def all_reduce(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, chunks: int) -> torch.Tensor:
    """See `crossfade.ops.matmul_all_reduce`."""
    works: list[Any] = []
    for begin, end in cut_evenly(len(a), chunks):
        torch.mm(a[begin:end], b, out=out[begin:end])
        works.append(dist.all_reduce(out[begin:end], async_op=True))
    for work in works:
        work.wait()
    return out


def all_gather(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, chunks: int) -> torch.Tensor:
    """See `crossfade.ops.all_gather_matmul`."""
    move = _named("all_gather_single", "all_gather_into_tensor")
    num_ranks, (rows, depth) = len(out) // len(a), a.shape
    pieces = [(begin, end, a.new_empty(num_ranks, end - begin, depth)) for begin, end in cut_evenly(rows, chunks)]
    works = [move(part.flatten(0, 1), a[begin:end], async_op=True) for begin, end, part in pieces]
    for work, (begin, end, part) in zip(works, pieces, strict=True):
        work.wait()
        _multiply_all(part, b, out.view(num_ranks, rows, b.shape[1])[:, begin:end])
    return out


def all_to_all(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, chunks: int, received: Sequence[int], sent: Sequence[int]
) -> torch.Tensor:
    """See `crossfade.ops.matmul_all_to_all`."""
    pieces: list[tuple[int, int, torch.Tensor, Any]] = []
    for begin, end in cut_evenly(b.shape[1], chunks):
        product, arrived = a.new_empty(len(a), end - begin), a.new_empty(len(out), end - begin)
        torch.mm(a, b[:, begin:end], out=product)
        work = dist.all_to_all_single(arrived, product, list(received), list(sent), async_op=True)
        pieces.append((begin, end, arrived, work))
    for begin, end, arrived, work in pieces:
        work.wait()
        out[:, begin:end].copy_(arrived)
    return out


CHUNKED: Mapping[str, Callable[..., torch.Tensor]] = {
    Operator.REDUCE_SCATTER: reduce_scatter,
    Operator.ALL_REDUCE: all_reduce,
    Operator.ALL_GATHER: all_gather,
    Operator.ALL_TO_ALL: all_to_all,
}
"""By operator: fills ``out`` with the result of ``a @ b`` and its collective over the default group, in so many ``chunks``."""
