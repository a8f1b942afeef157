"""The matrix of ``benchmarks.tile_ops``: which shapes each operator is measured with, and the names of what is measured.

Letters: of each of W GPUs a product (M, K) by (K, N); for an all-gather M counts the rows of all GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crossfade.ops.calls.job import ITEM_BYTES, Layout, Operator, Shape
from crossfade.ops.choice.candidate import BASELINES

CUBLAS, NCCL, COPIES = "cuBLAS", "NCCL", "copy engines"
"""The parts alone: the product, and the collective of the product's size by NCCL and by `crossfade.peers`."""
SERIAL, FUSED = "cuBLAS + NCCL", "torch fused"
"""torch.mm and torch.distributed's collective, called bare, and ``torch.ops.symm_mem.fused_*``."""
CROSSFADE = "crossfade"
"""The operator without a candidate, after tuning."""
SIGNALED = "matmul_signaled + NCCL"
"""A program's own all-reduce by torch.distributed of each eighth of the rows, on the signals of `matmul_signaled`."""
PRODUCTS, BESIDE = "products alone", f"{SERIAL}, weight gradients beside"
"""Of an MLP: without communication, and with NCCL's scatter beside the product of a weight's gradient."""
SHARED = ", shared out"
"""Behind a name: with an output that all ranks can write."""
PARTS = (CUBLAS, NCCL, COPIES)
BASELINE_WAYS = BASELINES
"""Names of candidates that are torch's and NCCL's own ways."""
CHUNKED = "chunked"
"""How names of the baseline in `benchmarks.tile_chunked` begin."""

RS, AR, AG, A2A = Operator.REDUCE_SCATTER, Operator.ALL_REDUCE, Operator.ALL_GATHER, Operator.ALL_TO_ALL
SHORT = {"rs": RS, "ar": AR, "ag": AG, "a2a": A2A}
"""What the command line calls the operators, besides their names."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operator with one shape.

    Attributes:
        operator: one of `Operator`.
        m, n, k: of one GPU's product.
        num_ranks: W.
        is_uneven: all-to-all: counts that differ, see `counts_of`.
        dtype: of the elements.
        layout: of b, one of `Layout`.
    """

    operator: str
    m: int
    n: int
    k: int
    num_ranks: int
    is_uneven: bool = False
    dtype: str = "bfloat16"
    layout: str = Layout.COLUMNS

    @property
    def sizes(self) -> str:
        """As tables have it."""
        return f"{self.m}, {self.n}, {self.k}{', uneven' if self.is_uneven else ''}"

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self.operator} {self.sizes} {self.dtype} {self.layout} x{self.num_ranks}"

    @property
    def shape(self) -> Shape:
        """As the tuner sees it."""
        return Shape(self.operator, self.m, self.n, self.k, self.dtype, self.layout, self.num_ranks)

    @property
    def buffer_bytes(self) -> int:
        """Of a group's buffers, so that a rank's whole block fits into a slot."""
        columns = self.k if self.operator == AG else self.n
        block = -(-self.m // self.num_ranks)
        if self.is_uneven:
            block = max(map(max, counts_of(self)))
        return self.num_ranks * block * columns * ITEM_BYTES[self.dtype]

    @property
    def out_bytes(self) -> int:
        """Of what an all-reduce gives."""
        return self.m * self.n * ITEM_BYTES[self.dtype]

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


def counts_of(row: Row) -> list[list[int]]:
    """How many rows go from each rank to each: M from each; of uneven ones rank 0 gets most, and each pair has its own number."""
    num_ranks = row.num_ranks
    if not row.is_uneven:
        return [[row.m // num_ranks] * num_ranks for _ in range(num_ranks)]
    found = []
    for p in range(num_ranks):
        weights = [1 + (p + q) % num_ranks + (num_ranks // 2 if q == 0 else 0) for q in range(num_ranks)]
        counts = [row.m * weight // sum(weights) for weight in weights]
        counts[p] += row.m - sum(counts)
        found.append(counts)
    return found


Sizes = tuple[int, int, int]
CORE: Sequence[Sizes] = (
    (8192, 8192, 7168), (8192, 8192, 2048), (2048, 8192, 7168), (512, 8192, 7168),
    (8192, 16384, 4096), (16384, 8192, 7168), (16384, 16384, 4096), (8192, 7168, 2048),
)  # fmt: skip
ROWS_OF_M = (512, 1024, 2048, 4096, 8192, 16384)
EXPERTS: Sequence[Sizes] = ((32768, 7168, 2048), (16384, 4096, 14336))
"""DeepSeek-V3 (expert down, combine) and Mixtral."""


def core(operator: Operator, num_ranks: int) -> Iterator[Row]:
    """Eight rows of each operator: of an all-gather gate-up and q, k, v of a 70 B model and gate-up of a 405 B one, of an
    all-to-all the experts, one of them uneven, and five of those that the sums have.
    """
    if operator == AG:
        sizes: Sequence[Sizes] = (
            *((m, 57344 // num_ranks, 8192) for m in (8192, 2048, 512, 4096, 16384)),
            *((m, 10240 // num_ranks, 8192) for m in (8192, 16384)),
            (8192, 106496 // num_ranks, 16384),
        )
    elif operator == A2A:
        yield Row(operator, *EXPERTS[0], num_ranks, is_uneven=True)
        sizes = (*EXPERTS, *CORE[:4], CORE[5])
    else:
        sizes = CORE
    yield from (Row(operator, *each, num_ranks) for each in sizes)


def full(operator: Operator, num_ranks: int) -> Iterator[Row]:
    """The core rows, then those of published models and of FlashOverlap."""
    yield from core(operator, num_ranks)
    if operator == AG:
        sizes: list[Sizes] = [(m, 57344 // num_ranks, 8192) for m in ROWS_OF_M]
        sizes += [(m, 106496 // num_ranks, 16384) for m in (2048, 16384)]
    elif operator == A2A:
        yield Row(operator, *EXPERTS[1], num_ranks, is_uneven=True)
        sizes = [CORE[4], *CORE[6:]]
    else:
        sizes = [(m, 8192, 28672 // num_ranks) for m in ROWS_OF_M]
        sizes += [(8192, 8192, 8192 // num_ranks), (8192, 16384, 16384 // num_ranks), (8192, 16384, 53248 // num_ranks)]
        sizes += [(m, n, k) for m, n in ((8192, 8192), (16384, 8192), (16384, 16384)) for k in (2048, 4096, 8192)]
    yield from (Row(operator, *each, num_ranks) for each in sizes)


def tiny(operator: Operator, num_ranks: int) -> Iterator[Row]:
    """For a trial."""
    for sizes in ((64 * num_ranks, 48, 32), (16 * num_ranks, 24, 40)):
        yield Row(operator, *sizes, num_ranks)
    if operator == A2A:
        yield Row(operator, 64 * num_ranks, 48, 32, num_ranks, is_uneven=True)


MATRICES = {"core": core, "full": full, "tiny": tiny}


def rows_of(matrix: str, operators: Sequence[Operator], num_ranks: int) -> list[Row]:
    """All of them once, operator by operator."""
    return list(dict.fromkeys(row for operator in operators for row in MATRICES[matrix](operator, num_ranks)))


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor-parallel MLP, forward and backward, each rank with its part of the sequence.

    Attributes:
        tokens: of all ranks.
        hidden, inner: lengths, of all ranks; of a 70 B model 8192 and 28672.
        num_ranks: W.
        is_gated: two products up, ``silu(one) * other``; else one, ``silu(it)``.
        dtype: of the elements.
    """

    tokens: int
    hidden: int
    inner: int
    num_ranks: int
    is_gated: bool = False
    dtype: str = "bfloat16"

    @property
    def sizes(self) -> str:
        """As tables have it."""
        return f"{self.tokens}, {self.hidden}, {self.inner}{', gated' if self.is_gated else ''}"

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"mlp {self.sizes} {self.dtype} x{self.num_ranks}"

    @property
    def buffer_bytes(self) -> int:
        """Of a group's buffers."""
        return self.tokens * self.hidden * ITEM_BYTES[self.dtype]

    @property
    def shapes(self) -> list[Shape]:
        """Of its operators: forward up and down, backward down and up."""
        inner, up = self.inner // self.num_ranks, (1 + self.is_gated) * self.inner // self.num_ranks
        sizes = (
            (AG, up, self.hidden, Layout.COLUMNS),
            (RS, self.hidden, inner, Layout.COLUMNS),
            (AG, inner, self.hidden, Layout.ROWS),
            (RS, self.hidden, up, Layout.ROWS),
        )
        return [Shape(name, self.tokens, n, k, self.dtype, layout, self.num_ranks) for name, n, k, layout in sizes]

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)
