"""Sums by tiles: one kernel of our own for the product, which says piece by piece what is done, and copy engines that move it.

The turns and what they wait for are drawn in turns.py, the kernels in kernels.py. No SM communicates: the own rows' kernel adds the
other ranks' parts in its epilogue. Parts are rounded to the element type, the own one is not; they are added in float32 in the
order of the ranks, and the sum is rounded once, so all ranks and all calls get the same bits.

``rounds`` cut every rank's block: more of them hide more of an all-reduce's sums, and cost launches. ``group_rows`` is the most
that a piece has (0: all of a rank's rows in a round). ``reserve_sms`` are left to others.
"""

from __future__ import annotations

from crossfade.ops import turns
from crossfade.ops.calls import on_lane
from crossfade.ops.job import Job
from crossfade.ops.pieces import require_slot

__all__ = ["all_reduce", "reduce_scatter"]


def reduce_scatter(job: Job, *, rounds: int, group_rows: int, reserve_sms: int) -> None:
    """See `matmul_reduce_scatter`."""
    from crossfade.ops.tile_work import work_of

    _require_slot(job)
    products = job.empty(len(job.a), job.num_columns)
    address = products.data_ptr()
    work = work_of(
        job, address, num_rounds=rounds, piece_rows=group_rows, lag=rounds - 1, reserve_sms=reserve_sms, has_copy=False
    )
    with on_lane(job) as (lane, stream, local):
        made = work.turns(job, stream, products, job.out.data_ptr())
        turns.reduce_scatter(lane, stream, local, made, rounds, job.fill)


def all_reduce(job: Job, *, rounds: int, group_rows: int, reserve_sms: int) -> None:
    """See `matmul_all_reduce`. All partial products lie in ``out``."""
    from crossfade.ops.tile_work import work_of

    _require_slot(job)
    group, address = job.group, job.out.data_ptr()
    offset = group.shared_offset(job.out)
    lag = min(1, rounds - 1)
    work = work_of(
        job,
        address,
        num_rounds=rounds,
        piece_rows=group_rows,
        lag=lag,
        reserve_sms=reserve_sms,
        has_copy=offset is None,
    )
    own = work.plan.own_block.begin * job.num_columns * job.out.itemsize
    with on_lane(job) as (lane, stream, _):
        made = work.turns(job, stream, job.out, address + own)
        place = None if offset is None else offset + own
        turns.all_reduce(lane, stream, made, work.runs(address), place)
        job.fill()


def _require_slot(job: Job) -> None:
    """A whole block has to fit into a slot."""
    block = -(-len(job.a) // job.group.num_ranks)
    require_slot(job.group.lane(job.lane).slot_bytes, block * job.num_columns * job.a.itemsize, job.group.num_ranks)
