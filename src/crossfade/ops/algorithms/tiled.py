"""Sums by tiles: one kernel of our own for the product, which says piece by piece what is done, and copy engines that move it.

The steps and what they wait for are drawn in schedule.py, the kernels in kernels.py. No SM communicates: the own rows' kernel adds
the other ranks' parts in its epilogue. Parts are rounded to the element type, the own one is not; they are added in float32 in the
order of the ranks, and the sum is rounded once, so all ranks and all calls get the same bits.

``rounds`` cut every rank's block: more of them hide more of an all-reduce's sums, and cost launches. ``group_rows`` is the most
that a piece has (0: all of a rank's rows in a round). ``reserve_sms`` are left to others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.ops.algorithms import schedule
from crossfade.ops.calls.job import Job, Operator, on_lane
from crossfade.ops.calls.products import require_slot

if TYPE_CHECKING:
    from crossfade.ops.algorithms.tile_work import TileWork


def reduce_scatter(job: Job, *, rounds: int, group_rows: int, reserve_sms: int) -> None:
    """See `matmul_reduce_scatter`."""
    products = job.empty(len(job.a), job.num_columns)
    work = _work(job, products.data_ptr(), rounds, group_rows, reserve_sms)
    with on_lane(job) as (lane, stream, local):
        made = work.steps(job, stream, products, job.out.data_ptr())
        schedule.reduce_scatter(lane, stream, local, made, rounds, job.fill)


def all_reduce(job: Job, *, rounds: int, group_rows: int, reserve_sms: int) -> None:
    """See `matmul_all_reduce`. All partial products lie in ``out``."""
    address, offset = job.out.data_ptr(), job.group.shared_offset(job.out)
    work = _work(job, address, rounds, group_rows, reserve_sms)
    own = work.plan.own_block.begin * job.num_columns * job.out.itemsize
    with on_lane(job) as (lane, stream, _):
        made = work.steps(job, stream, job.out, address + own)
        place = None if offset is None else offset + own
        schedule.all_reduce(lane, stream, made, work.runs(address), place)
        job.fill()


def prepare(job: Job, *, rounds: int, group_rows: int, reserve_sms: int) -> None:
    """Loads the kernels for such calls."""
    _work(job, job.out.data_ptr(), rounds, group_rows, reserve_sms)


def _work(job: Job, address: int, rounds: int, group_rows: int, reserve_sms: int) -> TileWork:
    """What is prepared for a call whose product's row 0 goes to ``address``."""
    from crossfade.ops.algorithms.tile_work import work_of

    block = -(-len(job.a) // job.group.num_ranks)
    require_slot(job.group.lane(job.lane).slot_bytes, block * job.num_columns * job.a.itemsize, job.group.num_ranks)
    is_scattered = job.name == Operator.REDUCE_SCATTER
    return work_of(
        job,
        address,
        num_rounds=rounds,
        piece_rows=group_rows,
        lag=rounds - 1 if is_scattered else min(1, rounds - 1),
        reserve_sms=reserve_sms,
        has_copy=not is_scattered and job.group.shared_offset(job.out) is None,
    )
