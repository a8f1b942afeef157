"""The operators without gradients: from what a caller gave to the algorithm that fills the output.

Each function checks the operands, makes the output, asks for the algorithm and gives it a `Job`. Those of gradients' own are here
too. Their arguments are those of the public operators of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from crossfade.marks import marked
from crossfade.ops.algorithms import fused, plain, rounds
from crossfade.ops.calls.counts import Counts
from crossfade.ops.calls.job import (
    Algorithm,
    Job,
    Once,
    Operator,
    check_operands,
    check_out,
    multiply_rows,
    rows_for_each,
    store,
)
from crossfade.ops.calls.products import multiply
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.choice.choose import WarmUp, algorithm_of
from crossfade.peers.arguments import check_overlap

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup

Chosen = Candidate | WarmUp | str | None

ALGORITHMS: Mapping[Operator, dict[str, Algorithm]] = {
    Operator.REDUCE_SCATTER: {
        "plain": plain.reduce_scatter,
        "rounds": rounds.reduce_scatter,
        "fused": fused.reduce_scatter,
    },
    Operator.ALL_REDUCE: {"plain": plain.all_reduce, "rounds": rounds.all_reduce},
    Operator.ALL_GATHER: {"plain": plain.all_gather, "rounds": rounds.all_gather, "fused": fused.all_gather},
    Operator.ALL_TO_ALL: {"plain": plain.all_to_all, "rounds": rounds.all_to_all},
}
"""By the names of candidates."""


def _reduce(
    name: Operator,
    a: Tensor,
    b: Tensor,
    group: PeerGroup,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    lane: int = 0,
    candidate: Chosen = None,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    fill = Once(meanwhile, group.is_capturing)
    operands = check_operands(name, group, a, b, bias)
    num_rows, columns, is_whole = len(operands.a), b.shape[1], name is Operator.ALL_REDUCE
    lead = a.shape[:-1] if is_whole else (rows_for_each(name, group, num_rows),)
    target = check_out(name, group, operands, out, (*lead, columns))
    run = algorithm_of(name, group, operands, num_rows, candidate, ALGORITHMS[name], lane=lane)
    if target.numel():
        own = operands.bias if group.rank == 0 else None
        rows = target.view(num_rows, columns) if is_whole else target
        has_bias, is_new_out = bias is not None, out is None
        run(Job(name, group, lane, operands.a, b, own, rows, has_bias=has_bias, is_new_out=is_new_out, fill=fill))
    fill()
    return store(group, out, target)


reduce_scatter = marked("matmul_reduce_scatter")(partial(_reduce, Operator.REDUCE_SCATTER))
"""`matmul_reduce_scatter`."""
all_reduce = marked("matmul_all_reduce")(partial(_reduce, Operator.ALL_REDUCE))
"""`matmul_all_reduce`."""


@marked("all_gather_matmul")
def all_gather(
    a: Tensor,
    b: Tensor,
    group: PeerGroup,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    gathered: Tensor | None = None,
    lane: int = 0,
    candidate: Chosen = None,
) -> Tensor:
    """`all_gather_matmul`."""
    name = Operator.ALL_GATHER
    operands = check_operands(name, group, a, b, bias)
    num_rows = group.num_ranks * len(operands.a)
    target = check_out(name, group, operands, out, (num_rows, b.shape[1]))
    if gathered is not None:
        place = -group.rank * operands.a.nbytes
        check_out(name, group, operands, gathered, (num_rows, b.shape[0]), "gathered", place)
        if not gathered.is_contiguous():
            raise ValueError(f"gathered of {name} is not contiguous\nhint: torch.empty({num_rows}, {b.shape[0]})")
        if out is not None:
            check_overlap(f"{name} with gathered", gathered, out, None)
    run = algorithm_of(name, group, operands, num_rows, candidate, ALGORITHMS[name], lane=lane)
    job = Job(name, group, lane, operands.a, b, operands.bias, target, gathered, is_new_out=out is None)
    if operands.a.numel():
        run(job)
    elif num_rows:  # K is 0: there is nothing to gather, and the product is the bias
        multiply_rows(job, operands.a.new_empty(num_rows, 0), target)
    return store(group, out, target)


@marked("matmul_all_to_all")
def all_to_all(
    a: Tensor,
    b: Tensor,
    group: PeerGroup,
    counts: Sequence[Sequence[int]] | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    lane: int = 0,
    candidate: Chosen = None,
) -> Tensor:
    """`matmul_all_to_all`."""
    name = Operator.ALL_TO_ALL
    operands = check_operands(name, group, a, b, bias)
    known = counts_of(group, len(operands.a), counts)
    target = check_out(name, group, operands, out, (sum(known.received), b.shape[1]))
    run = algorithm_of(
        name, group, operands, known.most_sent, candidate, ALGORITHMS[name], most_received=known.most_received
    )
    if known.largest and b.shape[1]:
        run(Job(name, group, lane, operands.a, b, operands.bias, target, counts=known))
    return store(group, out, target)


def counts_of(group: PeerGroup, num_rows: int, given: Sequence[Sequence[int]] | None) -> Counts:
    """What a caller gave, checked; None for an equal share of this rank's rows to each."""
    num_ranks = group.num_ranks
    if given is None:
        return Counts.even(rows_for_each(Operator.ALL_TO_ALL, group, num_rows), group.rank, num_ranks)
    rows = tuple(tuple(int(count) for count in row) for row in given)
    if len(rows) != num_ranks or any(len(row) != num_ranks or min(row) < 0 for row in rows):
        raise ValueError(
            f"counts of {Operator.ALL_TO_ALL} are {[list(row) for row in rows]}\n"
            f"hint: {num_ranks} rows of {num_ranks} counts that are not negative"
        )
    if sum(rows[group.rank]) != num_rows:
        raise ValueError(
            f"a of {Operator.ALL_TO_ALL} has {num_rows} rows, and counts[{group.rank}] are {sum(rows[group.rank])} in all\n"
            "hint: counts[p][q] rows go from rank p to rank q"
        )
    return Counts(rows, group.rank)


def all_to_all_first(
    a: Tensor, b: Tensor, group: PeerGroup, counts: Counts, *, candidate: Candidate, gathered: Tensor, lane: int = 0
) -> Tensor:
    """All ranks' rows for this one, times this rank's matrix: the way back of `matmul_all_to_all`, which its gradient takes.

    =========  ===================  ===========================================================================
    tensor     shape                what
    =========  ===================  ===========================================================================
    a          (M, K), contiguous   first the rows for rank 0, then those for rank 1, ...
    b          (K, N)               of each rank its own; row-major or transposed
    out        (R, N)               first the rows from rank 0 times b, then those from rank 1, ...
    gathered   (R, K), contiguous   the rows themselves
    =========  ===================  ===========================================================================

    By ``rounds`` a rank's rows are multiplied where and when they arrive, the own ones first; by all other candidates all rows go,
    and then all are multiplied.
    """
    out = a.new_empty(sum(counts.received), b.shape[1])
    if not (counts.largest and a.shape[1]):
        group.do(out.zero_)
        return out
    job = Job("all_to_all_matmul", group, lane, a, b, None, out, gathered, counts)
    if candidate.name == "rounds":
        rounds.all_to_all_first(job, **candidate.arguments)
    else:
        plain.all_to_all_first(job)
    return out


def replicated(a: Tensor, b: Tensor, group: PeerGroup, *, bias: Tensor | None = None) -> Tensor:
    """`replicated_matmul`."""
    rows, matrix, added = check_operands("replicated_matmul", group, a, b, bias)
    out = a.new_empty(*a.shape[:-1], b.shape[1])
    group.do(partial(multiply, rows, matrix, out.view(len(rows), b.shape[1]), added))
    return out
