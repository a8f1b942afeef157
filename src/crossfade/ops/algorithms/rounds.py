"""The operators by copy engines, which take no SM: R ``rounds``, each with 1/R of every rank's rows and an exchange of the lane.

How a round hides what it moves is drawn in overlaps.py and schedule.py; here rows become addresses. ``rounds`` are more where the
lane's slots are shorter than a round's part. Partial products are rounded to the element type, added in float32 (float64 in
float64) in the order of the ranks, and rounded once, so all ranks get the same bits. Measured with a Triton product in the place of
cuBLAS: decision 0013.

For sums, a round's own rows may come ``lag`` rounds later than they could, and each round may be ``taper`` times as long as the
next, so that little is left to be moved at the end. Moves have neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from crossfade.device.borrowed import tensor_on
from crossfade.device.copies import stagger
from crossfade.ops.algorithms import overlaps, schedule
from crossfade.ops.algorithms.overlaps import Part
from crossfade.ops.algorithms.schedule import Run, Send, Step
from crossfade.ops.calls.job import Job, OnLane, multiply_rows, on_lane
from crossfade.ops.calls.products import cut_evenly, fits, in_order, least_rounds, place, require_slot, shares
from crossfade.peers.arguments import kind_of
from crossfade.peers.lane import Epoch
from crossfade.peers.memory import Reduction

if TYPE_CHECKING:
    from torch import Tensor


def reduce_scatter(job: Job, *, rounds: int, lag: int, taper: int) -> None:
    """See `matmul_reduce_scatter`."""
    rank, num_ranks, block = job.group.rank, job.group.num_ranks, len(job.out)
    products = job.empty(len(job.a), job.num_columns)
    cuts, weights, lag = _exchanges(job, block, rounds, lag, taper)
    with on_lane(job) as (lane, stream, local):
        for begin, end in cuts:
            rows = [slice(p * block + begin, p * block + end) for p in range(num_ranks)]
            targets = [products[each] for each in rows]
            targets[rank] = job.out[begin:end]
            made = _Sums(job, stream, [job.a[each] for each in rows], targets, weights).steps(lag)
            fill = job.fill if end == block else None
            schedule.reduce_scatter(lane, stream, local, made, len(weights), fill, is_only=len(cuts) == 1)


def all_reduce(job: Job, *, rounds: int, lag: int, taper: int) -> None:
    """See `matmul_all_reduce`. All partial products lie in ``out``."""
    group, num_rows = job.group, len(job.a)
    block = -(-num_rows // group.num_ranks)
    blocks = list(pairwise(min(p * block, num_rows) for p in range(group.num_ranks + 1)))
    shared = group.shared_offset(job.out)
    cuts, weights, lag = _exchanges(job, block, rounds, lag, taper)
    with on_lane(job) as (lane, stream, _):
        for begin, end in cuts:
            rows = [slice(min(first + begin, last), min(first + end, last)) for first, last in blocks]
            targets = [job.out[each] for each in rows]
            is_offered = shared is None
            sums = _Sums(job, stream, [job.a[each] for each in rows], targets, weights, is_offered=is_offered)
            offset = None if shared is None else shared + targets[group.rank].data_ptr() - job.out.data_ptr()
            schedule.all_reduce(lane, stream, sums.steps(lag), sums.runs(), offset)
        job.fill()  # beside the last sums' passing on, which is longer than the last part's way here


def _exchanges(job: Job, block: int, rounds: int, lag: int, taper: int) -> tuple[list[tuple[int, int]], list[int], int]:
    """The rows of a rank's block that each exchange has, the weights of its rounds, and their lag.

    Where a whole block goes into a slot all rounds are one exchange, else each is one by itself.
    """
    if fits(job.group.lane(job.lane).slot_bytes, block * job.num_columns * job.out.itemsize):
        return [(0, block)], shares(rounds, taper), lag
    return _cut(job, block, job.out, rounds), [1], 0


class _Sums:
    """The steps of a call whose products torch does, block by block, and whose parts a kernel adds."""

    def __init__(
        self,
        job: Job,
        stream: int,
        rows: list[Tensor],
        blocks: list[Tensor],
        shares: Sequence[int],
        *,
        is_offered: bool = False,
    ) -> None:
        self._job, self._stream, self._is_offered = job, stream, is_offered
        self._rows, self.blocks, self._num_rounds = rows, blocks, len(shares)
        self._ends = [0, *accumulate(shares)]
        self._kind = kind_of(job.name, job.out)

    def steps(self, lag: int) -> list[Step]:
        """In their order, with own steps so many rounds late."""
        group = self._job.group
        made = []
        for number, is_own in in_order(self._num_rounds, lag):
            if is_own:
                launch, add = partial(self._compute, group.rank, number), partial(self._add, number)
                made.append(Step(number, None, launch, add))
                continue
            made.append(Step(number, [self._send(p, number) for p in stagger(group.rank, group.num_ranks)]))
        return made

    def runs(self) -> list[dict[int, Run]]:
        """For each round, every rank's rows."""
        return [
            {p: self._run(p, number) for p in range(self._job.group.num_ranks)} for number in range(self._num_rounds)
        ]

    def _slice(self, p: int, number: int) -> slice:
        begin, end = (place(len(self.blocks[p]), each, self._ends[-1]) for each in self._ends[number : number + 2])
        return slice(begin, end)

    def _run(self, p: int, number: int) -> Run:
        part = self.blocks[p][self._slice(p, number)]
        return Run(part.data_ptr(), part.data_ptr() - self.blocks[p].data_ptr(), part.nbytes)

    def _send(self, p: int, number: int) -> Send:
        address, offset, size_bytes = self._run(p, number)
        return Send(p, address, offset, size_bytes, partial(self._compute, p, number))

    def _compute(self, p: int, number: int) -> None:
        rows = self._slice(p, number)
        multiply_rows(self._job, self._rows[p][rows], self.blocks[p][rows])

    def _add(self, number: int, parts: Epoch, sums: Epoch | None) -> None:
        group = self._job.group
        rank, memory = group.rank, group.memory
        own, offset, size_bytes = self._run(rank, number)
        if not size_bytes:
            return
        targets: tuple[int, ...] = (own,)
        if self._is_offered:
            assert sums is not None, "sums are offered in the second exchange"
            targets = (own, sums.buffers[rank] + offset)
        slots = (parts.buffers[rank] + offset, group.lane(self._job.lane).slot_bytes, rank, group.num_ranks)
        count = size_bytes // self._kind.size_bytes
        memory.kernels.reduce(self._stream, Reduction(self._kind, count, targets, own, *slots))


def all_gather(job: Job, *, rounds: int, lag: int, taper: int) -> None:
    """See `all_gather_matmul`. Rows that are wanted in memory that all can write go there at once, in one round."""
    offset = None if job.gathered is None else job.group.shared_offset(job.gathered)
    if offset is not None:
        _gather_into(job, offset)
        return
    parts = _cut(job, len(job.a), job.a, rounds)
    with on_lane(job) as at:
        work = [(_part(job.a[begin:end]), partial(_use, job, at, begin, end)) for begin, end in parts]
        overlaps.all_gather(at.lane, at.stream, work)


def _use(job: Job, at: OnLane, begin: int, end: int, peer: int, address: int) -> None:
    """The product of some of a rank's rows; and the rows themselves, where the caller wants them."""
    first = peer * len(job.a)
    place = slice(first + begin, first + end)
    own = peer == job.group.rank
    rows = job.a[begin:end] if own else _at(job, address, end - begin, job.a.shape[1])
    multiply_rows(job, rows, job.out[place])
    if job.gathered is not None:
        _keep(at, job.gathered[place], address)


def _keep(at: OnLane, target: Tensor, address: int) -> None:
    if target.data_ptr() != address:
        at.lane.memory.kernels.copy(at.stream, target.data_ptr(), address, target.nbytes)


def _gather_into(job: Job, offset: int) -> None:
    gathered, own = job.gathered, _part(job.a)
    assert gathered is not None, "rows that go somewhere"
    rows, rank = len(job.a), job.group.rank

    def use(p: int) -> None:
        place = slice(p * rows, (p + 1) * rows)
        multiply_rows(job, job.a if p == rank else gathered[place], job.out[place])
        if p == rank:
            _keep(at, gathered[place], own.address)

    with on_lane(job) as at:
        overlaps.all_gather_into(*at, own, offset + rank * own.size_bytes, use)


def all_to_all(job: Job, *, rounds: int, lag: int, taper: int) -> None:
    """See `matmul_all_to_all`."""
    counts, rank = job.counts, job.group.rank
    assert counts is not None, "an all-to-all has counts"
    parts = _cut(job, counts.largest, job.out, rounds)
    with on_lane(job) as (lane, stream, local):
        for begin, end in parts:
            sent = _shares(job.a, counts.sent_at(), counts.sent, begin, end)
            received = _shares(job.out, counts.received_at(), counts.received, begin, end)
            compute = partial(_compute_into, job, sent, received[rank])
            places = {p: _part(received[p]) for p in lane.memory.peers}
            overlaps.all_to_all(lane, stream, local, compute, places, is_first=not begin)


def all_to_all_first(job: Job, *, rounds: int, lag: int = 0, taper: int = 1) -> None:
    """See `crossfade.ops.forward.all_to_all_first`: the rows go first, and are multiplied as they arrive, where they arrive."""
    counts = job.counts
    assert counts is not None, "an all-to-all has counts"
    parts = _cut(job, counts.largest, job.a, rounds)
    with on_lane(job) as at:
        work = []
        for begin, end in parts:
            sent = _shares(job.a, counts.sent_at(), counts.sent, begin, end)
            outs = _shares(job.out, counts.received_at(), counts.received, begin, end)
            kept = None
            if job.gathered is not None:
                kept = _shares(job.gathered, counts.received_at(), counts.received, begin, end)
            work.append(([_part(each) for each in sent], partial(_use_share, job, at, outs, kept)))
        overlaps.all_to_all_first(at.lane, at.stream, work)


def _use_share(job: Job, at: OnLane, outs: list[Tensor], kept: list[Tensor] | None, peer: int, address: int) -> None:
    out = outs[peer]
    if not len(out):
        return
    multiply_rows(job, _at(job, address, len(out), job.a.shape[1]), out)
    if kept is not None:
        _keep(at, kept[peer], address)


def _compute_into(job: Job, sent: list[Tensor], own: Tensor, peer: int, address: int | None) -> None:
    rows = sent[peer]
    multiply_rows(job, rows, own if address is None else _at(job, address, len(rows), job.num_columns))


def _shares(tensor: Tensor, firsts: list[int], counts: tuple[int, ...], begin: int, end: int) -> list[Tensor]:
    """Of each rank's rows, those from ``begin`` to ``end``, as far as there are any."""
    pairs = zip(firsts, counts, strict=True)
    return [tensor[first + min(begin, count) : first + min(end, count)] for first, count in pairs]


def _at(job: Job, address: int, rows: int, columns: int) -> Tensor:
    """What lies in this rank's buffer, as a matrix."""
    return tensor_on(address, (rows, columns), job.a.dtype, job.group.memory.driver.device)


def _part(tensor: Tensor) -> Part:
    return Part(tensor.data_ptr(), tensor.nbytes)


def _cut(job: Job, length: int, tensor: Tensor, rounds: int) -> list[tuple[int, int]]:
    """The share of a block of ``length`` rows of ``tensor`` that each round has: 1/R, or as much as a slot takes."""
    slot_bytes = job.group.lane(job.lane).slot_bytes
    row_bytes = tensor.shape[1] * tensor.itemsize
    require_slot(slot_bytes, row_bytes, job.group.num_ranks)
    return cut_evenly(length, max(rounds, least_rounds(slot_bytes, length, row_bytes)))
