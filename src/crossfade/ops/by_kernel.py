"""Sums by a kernel on few SMs that reads the other ranks' parts over the links: the candidate ``kernel``.

What is enqueued when is drawn in reads.py. torch multiplies R ``rounds`` of rows, each a share of every rank's block in one batched
product, into this rank's buffer of the lane; nothing is copied, and no rank writes into another one's slots. Partial products are
rounded to the element type, added in float32 (float64 in float64) in the order of the ranks, and rounded once: the bits of
``rounds`` where the products have the same, on all ranks and in all calls.

``taper``: each round is so many times as long as the next one, so that little is left to be read at the end. ``sms``: programs of
the kernel while something is computed beside it; the last sum takes all. ``reserve_sms``: what cuBLAS leaves free of the products
that run beside a sum (`crossfade.ops.reserved`); 0: the kernel takes the first SMs that become free, its stream being urgent.
``batched=0``: a product for each rank's share, in place of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from crossfade.device.borrowed import tensor_on
from crossfade.device.copies import stagger
from crossfade.ops import reads
from crossfade.ops.calls import on_lane
from crossfade.ops.job import Job
from crossfade.ops.peer_sums import ALL_SMS, PeerSum, peer_sum_of
from crossfade.ops.pieces import cut_evenly, least_rounds, place, require_slot, shares
from crossfade.ops.preparing import PREPARERS
from crossfade.ops.products import multiply_all, multiply_rows
from crossfade.ops.reads import Round
from crossfade.ops.reserved import leaving_sms
from crossfade.ops.shape import Operator
from crossfade.ops.turns import Run
from crossfade.peers.lane import Epoch

if TYPE_CHECKING:
    import torch

__all__ = ["all_reduce", "prepare", "reduce_scatter"]


def reduce_scatter(job: Job, *, rounds: int, taper: int, sms: int, reserve_sms: int, batched: int) -> None:
    """See `matmul_reduce_scatter`."""
    kernels, block = _kernels(job), len(job.out)
    sweeps = _cut(job, block)
    with on_lane(job) as (lane, stream, _):
        for begin, end in sweeps:
            rows = [slice(p * block + begin, p * block + end) for p in range(job.group.num_ranks)]
            made = _Rounds(job, kernels, rows, job.out[begin:end], shares(rounds, taper), sms, reserve_sms, batched)
            reads.reduce_scatter(lane, stream, made.rounds(), job.fill if end == block else None)
            if end < block:
                lane.join_local(stream)  # the next sweep's products write where this one's were read


def all_reduce(job: Job, *, rounds: int, taper: int, sms: int, reserve_sms: int, batched: int) -> None:
    """See `matmul_all_reduce`."""
    group, num_rows, is_shared = job.group, len(job.a), _is_shared(job)
    kernels, block = _kernels(job), -(-num_rows // group.num_ranks)
    sweeps = _cut(job, block)
    with on_lane(job) as (lane, stream, _):
        for begin, end in sweeps:
            rows = [_within(p * block, begin, end, min((p + 1) * block, num_rows)) for p in range(group.num_ranks)]
            out = job.out[rows[group.rank]]
            made = _Rounds(job, kernels, rows, out, shares(rounds, taper), sms, reserve_sms, batched)
            reads.all_reduce(lane, stream, made.rounds(), is_shared=is_shared)
            if end < block:
                lane.join_local(stream)
        job.fill()  # beside the last sums' way


def prepare(job: Job, **parameters: int) -> None:
    """Loads the kernels for such calls."""
    _kernels(job)


PREPARERS["kernel"] = prepare


def _is_shared(job: Job) -> bool:
    return job.group.shared_offset(job.out) is not None


class _Kernels(NamedTuple):
    """What adds.

    Attributes:
        beside: with a product beside it.
        last: with nothing beside it.
        num_told: other ranks into whose memory the last sum goes.
    """

    beside: PeerSum
    last: PeerSum
    num_told: int


def _kernels(job: Job) -> _Kernels:
    """Sums go nowhere else, or into the own buffer of the second exchange, the last one into all others', or into all outputs."""
    group = job.group
    if job.name != Operator.ALL_REDUCE:
        only = peer_sum_of(group, job.out.dtype)
        return _Kernels(only, only, 0)
    others = stagger(group.rank, group.num_ranks)
    last = peer_sum_of(group, job.out.dtype, others)
    return _Kernels(last if _is_shared(job) else peer_sum_of(group, job.out.dtype, [group.rank]), last, len(others))


def _cut(job: Job, block: int) -> list[tuple[int, int]]:
    """The rows of a block that are done in one go: all, or as many as a slot takes.

    Raises:
        DeviceError: not even one row fits into a slot.
    """
    slot_bytes, row_bytes = job.group.lane(job.lane).slot_bytes, job.num_columns * job.out.itemsize
    require_slot(slot_bytes, row_bytes, job.group.num_ranks)
    return cut_evenly(block, least_rounds(slot_bytes, block, row_bytes))


def _within(first: int, begin: int, end: int, last: int) -> slice:
    return slice(min(first + begin, last), min(first + end, last))


class _Rounds:
    """A product in rounds, whose rows lie rank by rank in this rank's buffer, and the sums of its own rows.

    Args:
        job: the call.
        kernels: add.
        rows: of ``a``, for each rank, one behind the other in the buffer.
        out: this rank's.
        weights: of the rounds.
        sms, reserve_sms, batched: see the file's head.
    """

    def __init__(
        self,
        job: Job,
        kernels: _Kernels,
        rows: Sequence[slice],
        out: torch.Tensor,
        weights: Sequence[int],
        sms: int,
        reserve_sms: int,
        batched: int,
    ) -> None:
        group = job.group
        self._job, self._kernels, self._rows, self._out = job, kernels, rows, out
        self._ends = [0, *accumulate(weights)]
        self._sms, self._reserve_sms = sms, reserve_sms
        self._lengths = [each.stop - each.start for each in rows]
        self._firsts = [0, *accumulate(self._lengths)]
        self._row_bytes: int = job.num_columns * job.out.itemsize
        self._base = group.home.buffers[group.rank]
        self._offset = group.shared_offset(out)
        self._is_batched = bool(batched) and len(set(self._lengths)) == 1
        self._is_whole = self._firsts[-1] == len(job.a)

    def rounds(self) -> list[Round]:
        """In their order."""
        is_reduced = self._job.name == Operator.ALL_REDUCE
        return [
            Round(
                partial(self._compute, number),
                partial(self._add, number),
                {p: self._run(p, number) for p in range(len(self._rows))} if is_reduced else None,
            )
            for number in range(len(self._ends) - 1)
        ]

    def _slice(self, p: int, number: int) -> slice:
        begin, end = (place(self._lengths[p], each, self._ends[-1]) for each in self._ends[number : number + 2])
        return slice(begin, end)

    def _run(self, p: int, number: int) -> Run:
        rows, first = self._slice(p, number), self._rows[p].start
        size_bytes = (rows.stop - rows.start) * self._row_bytes
        address = self._job.out.data_ptr() + (first + rows.start) * self._row_bytes
        return Run(address, (self._firsts[p] + rows.start) * self._row_bytes, size_bytes)

    def _compute(self, number: int, parts: Epoch) -> None:
        job, rank = self._job, self._job.group.rank
        shape = (self._firsts[-1], job.num_columns)
        products = tensor_on(parts.buffers[rank], shape, job.out.dtype, job.group.home.driver.device)
        with leaving_sms(job.group, self._reserve_sms if number else 0):
            if self._is_whole and len(self._ends) == 2:
                multiply_rows(job, job.a, products)
            elif self._is_batched:
                job.group.do(partial(self._multiply_all, products, self._slice(0, number)))
            else:
                for p, (first, rows) in enumerate(zip(self._firsts, self._rows, strict=False)):
                    each = self._slice(p, number)
                    multiply_rows(job, job.a[rows][each], products[first + each.start : first + each.stop])

    def _multiply_all(self, products: torch.Tensor, each: slice) -> None:
        job, num_ranks, length = self._job, len(self._rows), self._lengths[0]
        stride = self._rows[1].start - self._rows[0].start if num_ranks > 1 else length
        first, depth = self._rows[0].start, job.a.shape[1]
        row, column = job.a.stride()
        a = job.a[first:].as_strided((num_ranks, length, depth), (stride * row, row, column))
        out = products.view(num_ranks, length, job.num_columns)
        multiply_all(a[:, each], job.b, out[:, each], job.bias)

    def _add(self, number: int, stream: int, parts: Epoch, sums: Epoch | None, is_last: bool) -> int:
        """This rank's rows lie at one place of all ranks' buffers."""
        job, rank = self._job, self._job.group.rank
        offset, size_bytes = self._run(rank, number)[1:]
        begin = offset - self._firsts[rank] * self._row_bytes
        own, also_offset = parts.buffers[rank] + offset, 0
        if self._offset is not None:
            also_offset = self._offset + begin
        elif sums is not None:
            also_offset = sums.buffers[rank] - self._base + offset
        kernel = self._kernels.last if is_last else self._kernels.beside
        job.group.do(
            partial(
                kernel.launch,
                stream,
                self._out.data_ptr() + begin,
                own,
                size_bytes // job.out.itemsize,
                own - self._base,
                also_offset,
                ALL_SMS if is_last else self._sms,
            )
        )
        num_told = self._kernels.num_told if is_last or self._offset is not None else 0
        return (len(self._rows) - 1 + num_told) * size_bytes
