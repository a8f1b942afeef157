"""What takes turns in a row of ``benchmarks.tile_ops``: torch's bare calls, the parts alone, and every candidate of crossfade.

Operands are random normal numbers. What must come out is computed in float64 on the same devices, by torch.mm and
torch.distributed alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import tile_chunked
from benchmarks.tile_rows import (
    A2A,
    AG,
    AR,
    BASELINE_WAYS,
    CHUNKED,
    COPIES,
    CROSSFADE,
    CUBLAS,
    FUSED,
    NCCL,
    RS,
    SERIAL,
    SHARED,
    SIGNALED,
    Row,
    counts_of,
)
from crossfade.ops.calls.job import Operator
from crossfade.ops.choice.candidate import PLAIN, Candidate
from crossfade.ops.operators import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter
from crossfade.ops.signaled.product import matmul_signaled
from crossfade.peers import collectives
from crossfade.peers.group import PeerGroup

__all__ = ["CAPTURED", "EAGER", "MODES", "Ranks", "Side", "Work", "load_products", "named", "sides_of"]

EAGER, CAPTURED = MODES = ("eager", "captured")
FUNCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {
    RS: matmul_reduce_scatter,
    AR: matmul_all_reduce,
    AG: all_gather_matmul,
    A2A: matmul_all_to_all,
}
COLLECTIVES: Mapping[str, Callable[..., torch.Tensor]] = {
    RS: collectives.reduce_scatter,
    AR: collectives.all_reduce,
    AG: collectives.all_gather,
    A2A: collectives.all_to_all,
}
NUM_CHUNKS, LEAST_CHUNK = (2, 4, 8), 16
NUM_SIGNALED, SIGNALED_SMS = 8, 16
"""`SIGNALED`: groups of rows, and SMs that the product leaves to NCCL."""
MULTICAST_ROWS = 2048
"""Up to so many gathered rows torch may gather by multicast, unless it is asked for the rows too."""
Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Call = Callable[[], Outputs]
Product = Callable[[], torch.Tensor]
MOST_ERROR = {"bfloat16": 6e-3, "float16": 1e-3}
"""Of all elements together: the norm of the difference over the norm of the right ones."""
MOST_OFF = {"bfloat16": 0.15, "float16": 0.03}
"""Of one element: the difference over the root mean square of the right ones."""


def named(*names: str) -> Any:
    """The first of torch.distributed's functions that there is."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank, num_ranks: which, of how many.
        device: its own.
        groups: by mode: calls that are captured need a group whose lanes can be replayed.
        heaps: by mode: memory that all ranks can write, as long as the largest output of an all-reduce; None where there is none.
    """

    rank: int
    num_ranks: int
    device: torch.device
    groups: Mapping[str, PeerGroup]
    heaps: Mapping[str, torch.Tensor | None]

    def agree(self, is_right: bool) -> bool:
        """Whether all ranks say so."""
        return not any(self.largest([float(not is_right)]))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each number the largest of all ranks'."""
        box = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return [float(value) for value in box.tolist()]


def load_products(whole: torch.Tensor, b: torch.Tensor, counts: Sequence[int]) -> None:
    """Products of blocks and their parts, once: so that nobody loads their kernels while a stream waits for another rank.

    Args:
        whole: all rows.
        b: what they are multiplied with.
        counts: rows of each block.
    """
    lengths = set()
    for num_rounds in (1, 2, 3, 4, 8):
        step = -(-max(counts) // num_rounds)
        for begin in range(0, max(counts), step):
            lengths |= {min(begin + step, count) - min(begin, count) for count in counts}
    for length in sorted(lengths):
        torch.mm(whole[:length], b)


@dataclass
class Work:
    """A row's operands on this rank, and what must come out of them.

    Attributes:
        row: which.
        a, b: of the operator.
        whole: what this rank multiplies: for an all-gather all ranks' a.
        source: the collective's input: the product, or a of an all-gather.
        product: a buffer of the product's shape.
        gathered: all-gather: a buffer for all ranks' a.
        out: a buffer for what the operator gives.
        wanted: by name: ``product``, ``out`` and ``gathered``, float32.
        more: further arguments of the operator.
    """

    row: Row
    a: torch.Tensor
    b: torch.Tensor
    whole: torch.Tensor
    source: torch.Tensor
    product: torch.Tensor
    gathered: torch.Tensor
    out: torch.Tensor
    wanted: dict[str, torch.Tensor]
    more: dict[str, Any]
    sent: list[int]
    received: list[int]

    @property
    def most_error(self) -> float:
        """See `MOST_ERROR`."""
        return MOST_ERROR.get(self.row.dtype, 1e-5)

    @property
    def most_off(self) -> float:
        """See `MOST_OFF`."""
        return MOST_OFF.get(self.row.dtype, 1e-4)

    @classmethod
    def of(cls, row: Row, ranks: Ranks) -> Work:
        """Makes them. Collective."""
        torch.manual_seed(1000 * ranks.rank + 7)
        make = partial(torch.randn, dtype=getattr(torch, row.dtype), device=ranks.device)
        a = make(row.shape.rows_of_a, row.k)
        b = make(row.n, row.k).t() if row.layout == "nt" else make(row.k, row.n)
        counts = counts_of(row)
        sent, received = counts[ranks.rank], [each[ranks.rank] for each in counts]
        most: dict[str, int] = {RS: row.m // row.num_ranks, A2A: sum(received)}
        num_rows = most.get(row.operator, row.m)
        gathered = a.new_empty(row.m if row.operator == AG else 0, row.k)
        if row.operator == AG:
            named("all_gather_single", "all_gather_into_tensor")(gathered, a)
        whole = gathered.clone() if row.operator == AG else a
        product = a.new_empty(row.m, row.n)
        work = cls(row, a, b, whole, a, product, gathered, a.new_empty(num_rows, row.n), {}, {}, sent, received)
        if row.operator == A2A and row.is_uneven:
            work.more["counts"] = counts
        if row.operator != AG:
            work.source = torch.mm(a, b)
        work._expect()
        load_products(whole, b, sent)
        return work

    def _expect(self) -> None:
        product = torch.mm(self.whole.double(), self.b.double())
        wanted = self.wanted
        wanted["product"] = product.float()
        if self.row.operator == AG:
            wanted["out"], wanted["gathered"] = wanted["product"], self.whole.float()
            return
        wide = product.new_empty(self.out.shape)
        if self.row.operator == RS:
            named("reduce_scatter_single", "reduce_scatter_tensor")(wide, product)
        elif self.row.operator == A2A:
            dist.all_to_all_single(wide, product, self.received, self.sent)
        else:
            dist.all_reduce(product)
            wide = product
        wanted["out"] = wide.float()

    def collective(self, out: torch.Tensor, source: torch.Tensor) -> Product:
        """torch.distributed's; an all-reduce's is in place, and ``out`` is not used."""
        if self.row.operator == AR:
            call = partial(dist.all_reduce, source)
            return lambda: (call(), source)[1]
        if self.row.operator == A2A:
            call = partial(dist.all_to_all_single, out, source, self.received, self.sent)
        elif self.row.operator == AG:
            call = partial(named("all_gather_single", "all_gather_into_tensor"), out, source)
        else:
            call = partial(named("reduce_scatter_single", "reduce_scatter_tensor"), out, source)
        return lambda: (call(), out)[1]


@dataclass
class Side:
    """One that takes turns.

    Attributes:
        name: in tables.
        calls: by mode; each enqueues it once, and gives what comes out.
        wanted: which of `Work.wanted` that must be; None for what is not checked.
        before: done in front of a batch of calls, untimed.
        candidate: whose it is; None for torch's bare calls, the parts, and what the tuner chooses.
        is_ours: one of crossfade's operators.
        blocks: by mode: microseconds a call, of each block; None for one that was left out.
        errors: why a mode could not be done; by mode, and ``right`` for a wrong result.
        worst: largest relative error of its outputs, as a whole.
    """

    name: str
    calls: Mapping[str, Call]
    wanted: str | tuple[str, ...] | None = "out"
    before: Callable[[], object] | None = None
    candidate: Candidate | None = None
    is_ours: bool = False
    blocks: dict[str, list[list[float] | None]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {**self.blocks, "errors": self.errors, "worst": self.worst}


def sides_of(work: Work, ranks: Ranks, candidates: Sequence[Candidate], *, only_baselines: bool) -> list[Side]:
    """All that take turns: the parts, torch's ways, then crossfade's."""
    found = [*_parts(work, ranks), _serial(work), *_fused(work, ranks), *_chunked(work)]
    for candidate in candidates:
        found.append(_ours(work, ranks, str(candidate), candidate))
        if work.row.operator == AR and candidate.name not in BASELINE_WAYS and _has_heaps(ranks):
            found.append(_ours(work, ranks, f"{candidate}{SHARED}", candidate, is_shared=True))
    if not only_baselines:
        found += _signaled(work)
        found.append(_ours(work, ranks, CROSSFADE, None))
        if work.row.operator == AR and _has_heaps(ranks):
            found.append(_ours(work, ranks, f"{CROSSFADE}{SHARED}", None, is_shared=True))
    return found


def _has_heaps(ranks: Ranks) -> bool:
    return all(heap is not None for heap in ranks.heaps.values())


def _both(call: Call) -> dict[str, Call]:
    return dict.fromkeys(MODES, call)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.mm(a, b, out=out)
    return out


def _parts(work: Work, ranks: Ranks) -> list[Side]:
    row = work.row
    found = [Side(CUBLAS, _both(partial(_multiply, work.whole, work.b, work.product)), "product")]
    if row.operator == AR:  # in place: it would grow without end
        box = work.source.clone()
        found.append(Side(NCCL, _both(work.collective(box, box)), None, before=partial(box.copy_, work.source)))
    elif row.operator == AG:
        found.append(Side(NCCL, _both(work.collective(work.gathered, work.a)), "gathered"))
    else:
        found.append(Side(NCCL, _both(work.collective(work.out, work.source)), "out"))
    if not row.is_uneven:
        function = COLLECTIVES[row.operator]
        target = work.gathered if row.operator == AG else work.out
        calls = {mode: partial(function, work.source, ranks.groups[mode], target) for mode in MODES}
        found.append(Side(COPIES, calls, "gathered" if row.operator == AG else "out", is_ours=True))
    return found


def _serial(work: Work) -> Side:
    if work.row.operator == AG:
        gather = work.collective(work.gathered, work.a)

        def gather_then_multiply() -> torch.Tensor:
            gather()
            return _multiply(work.gathered, work.b, work.out)

        return Side(SERIAL, _both(gather_then_multiply))
    move = work.collective(work.out, work.product)

    def multiply_then_move() -> torch.Tensor:
        _multiply(work.a, work.b, work.product)
        return move()

    return Side(SERIAL, _both(multiply_then_move))


def _fused(work: Work, ranks: Ranks) -> list[Side]:
    """torch's own fused operators, where this torch has one for a GPU. (Multicast stays off: see `MULTICAST_ROWS`.)"""
    row = work.row
    if ranks.device.type != "cuda" or row.operator not in (RS, AG) or row.m % row.num_ranks:
        return []
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError:
        return []
    names: dict[str, str] = {RS: "fused_matmul_reduce_scatter", AG: "fused_all_gather_matmul"}
    function = getattr(torch.ops.symm_mem, names[row.operator], None)
    if function is None or os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        return []
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later torches need no such call, and say so
        symmetric.enable_symm_mem_for_group(name)
    if row.operator == RS:
        return [Side(FUSED, _both(lambda: function(work.a, work.b, "sum", 0, name)))]
    wants_rows = row.m <= MULTICAST_ROWS
    return [Side(FUSED, _both(lambda: function(work.a, [work.b], 0, name, return_A=wants_rows)[1][0]))]


def _chunked(work: Work) -> Iterator[Side]:
    """Both in pieces, where those are not too short."""
    length = {RS: len(work.out), AG: len(work.a), A2A: work.row.n}.get(Operator(work.row.operator), work.row.m)
    counts = (work.received, work.sent) if work.row.operator == A2A else ()
    for chunks in NUM_CHUNKS:
        if work.row.num_ranks > 1 and length >= chunks * LEAST_CHUNK:
            call = partial(tile_chunked.CHUNKED[work.row.operator], work.a, work.b, work.out, chunks, *counts)
            yield Side(f"{CHUNKED}(chunks={chunks})", _both(call))


@cache
def _small_kernels() -> Any:
    """A group whose NCCL kernels find room beside the product, as in ``examples/signaled_product.py``. Collective, once."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas, options.config.cga_cluster_size = SIGNALED_SMS, 0
    return dist.new_group(pg_options=options)


def _signaled(work: Work) -> list[Side]:
    if work.row.operator != AR:
        return []
    ranks = _small_kernels() if work.a.is_cuda else None

    def call() -> torch.Tensor:
        works: list[Any] = []
        out = matmul_signaled(
            work.a,
            work.b,
            on_group=lambda group: works.append(dist.all_reduce(group.tensor, group=ranks, async_op=True)),
            out=work.out,
            group_rows=work.row.m // NUM_SIGNALED,
            reserve_sms=SIGNALED_SMS,
        )
        for each in works:
            each.wait()  # the stream does, and not the host
        return out

    return [Side(SIGNALED, _both(call))]


def _ours(work: Work, ranks: Ranks, name: str, candidate: Candidate | None, *, is_shared: bool = False) -> Side:
    calls: dict[str, Call] = {}
    for mode in MODES:
        more, heap = dict(work.more), ranks.heaps[mode]
        if is_shared and heap is not None:
            more["out"] = heap[: work.out.numel()].view(work.out.shape)
        function = FUNCTIONS[work.row.operator]
        calls[mode] = partial(function, work.a, work.b, ranks.groups[mode], candidate=candidate, **more)
    return Side(name, calls, candidate=candidate, is_ours=candidate is None or candidate.name != PLAIN.name)
