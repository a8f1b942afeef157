"""The kernel of `matmul_signaled`, in Triton: a product whose pieces are signalled as they are done.

Letters: the product is (M, N) = a (M, K) @ b (K, N); a tile is BM x BN, done by steps of BK; P programs.

Persistent: each program takes every P-th tile of the table (`crossfade.ops.signaled.tiles`). A tile's rows may end before BM: what
lies behind them belongs to another piece, is computed, and is not stored. Behind each tile its piece's counter grows by 1: plain
stores, then a barrier of the program, then an atomic add by one thread that releases to all. (A store by descriptor is not released
by it in Triton 3.6.) Whoever sees the counter at the number of the piece's tiles sees all its rows. A tile is accumulated in
float32, the bias is added, and the sum is rounded once.

Each variant is compiled and loaded before use (`crossfade.ops.signaled.launch`), since to load a kernel while a stream waits hangs.
So no argument is specialised: what a kernel may rely on (layouts, alignment) is a constexpr. A *unit* is a power of two of which
counts and addresses (in elements, of 2 bytes) are multiples: 8 where all accesses can have 16 bytes.
"""

from __future__ import annotations

from typing import Any

from crossfade.errors import MissingDependency
from crossfade.ops.signaled.tiles import COUNTER_WORDS, ENTRY_WORDS

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingDependency("triton", extra="gpu", needed_for="tile operators") from None

_WORDS = tl.constexpr(COUNTER_WORDS)
_ENTRY = tl.constexpr(ENTRY_WORDS)  # of a tile in the table: first row, end of its rows, column in tiles, piece


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pointer_to(address: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """A pointer to elements of 2 bytes whose address is a multiple of ``UNIT`` of them."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 2 * UNIT)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _multiply(
    a: tl.tensor,
    b: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    k: tl.tensor,
    IS_B_TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, tl.cdiv(k, BK)):
        left = a.load([row, step * BK])
        right = b.load([column, step * BK]).T if IS_B_TRANSPOSED else b.load([step * BK, column])
        total = tl.dot(left, right, total)
    return total


def _product(
    a: tl.tensor,
    b: tl.tensor,
    n: tl.int32,
    k: tl.int32,
    table: tl.int64,
    num_tiles: tl.int32,
    counters: tl.int64,
    out: tl.int64,
    bias: tl.int64,
    KIND: tl.constexpr,
    IS_B_TRANSPOSED: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    if UNIT > 1:
        n = n // UNIT * UNIT  # so that the compiler sees it: a hint on an argument is lost
    entries = table.to(tl.pointer_type(tl.int32))
    words = counters.to(tl.pointer_type(tl.int32))
    entry = entries + min(tl.program_id(0), num_tiles - 1) * _ENTRY
    row, row_end, across = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    piece = tl.load(entry + 3)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=False):
        # Where the next tile lies is asked for now, and known when this one is done.
        entry = entries + min(tile + tl.num_programs(0), num_tiles - 1) * _ENTRY
        next_row, next_row_end, next_across = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        next_piece = tl.load(entry + 3)
        column = across * BN
        total = _multiply(a, b, row, column, k, IS_B_TRANSPOSED, BM, BN, BK)
        rows = row + tl.arange(0, BM)
        columns = column + tl.arange(0, BN)
        if HAS_BIAS:
            added = tl.load(_pointer_to(bias, KIND, UNIT) + columns, mask=columns < n, other=0.0)
            total += added.to(tl.float32)[None, :]
        to = _pointer_to(out, KIND, UNIT) + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(to, total.to(KIND), mask=(rows < row_end)[:, None] & (columns < n)[None, :])
        tl.debug_barrier()
        tl.atomic_add(words + piece * _WORDS, 1, sem="release", scope="sys")
        row, row_end, across, piece = next_row, next_row_end, next_across, next_piece


def _jit(function: Any) -> Any:
    kinds = function.__annotations__.items()
    return triton.jit(function, do_not_specialize=[name for name, kind in kinds if kind != "tl.constexpr"])


product_kernel = _jit(_product)
