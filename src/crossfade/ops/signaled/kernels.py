"""The kernel of tile operators, in Triton: a product whose pieces are signalled as they are done.

Letters: the product is (M, N) = a (M, K) @ b (K, N); W ranks, r this one; a tile is BM x BN, done by steps of BK; P programs.

**Product.** Persistent: each program takes every P-th tile of a stretch of the table (`crossfade.ops.signaled.tiles`). A tile's
rows may end before BM: what lies behind them belongs to another piece, is computed, and is not stored. Behind each tile its piece's
counter grows by 1: plain stores, then a barrier of the program, then an atomic add by one thread that releases to all. (A store
by descriptor is not released by it in Triton 3.6.) Whoever sees the counter at the number of the piece's tiles sees all its rows.

**Product with parts.** The same for the block of rank r, once the other ranks' parts of it have arrived. What is rounded when::

    part of rank k != r   in a slot: that rank's accumulator, rounded to the element type by that rank's product
    part of rank r        the accumulator, in float32 and never rounded
    total                 ((part 0 + part 1) + ...) + part W - 1, in float32, then + bias, then rounded once

With this accumulator in place of a rounded part of rank r, and no bias, that is the sum of `crossfade.peers.steps`, bit for bit.

Each variant is compiled and loaded before use (`crossfade.ops.signaled.launch`), since to load a kernel while a stream waits hangs.
So no argument is specialised: what a kernel may rely on (layouts, alignment) is a constexpr. A *unit* is a power of two of which
counts and addresses (in elements, of 2 bytes) are multiples: 8 where all accesses can have 16 bytes.
"""

from __future__ import annotations

from typing import Any

from crossfade.errors import MissingDependency
from crossfade.ops.signaled.tiles import ENTRY_WORDS

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingDependency("triton", extra="gpu", needed_for="tile operators") from None

COUNTER_WORDS = 16
"""Distance of two counters in words of 32 bits: they share no cache line."""

_WORDS = tl.constexpr(COUNTER_WORDS)
_ENTRY = tl.constexpr(ENTRY_WORDS)  # of a tile in the table: first row, end of its rows, column in tiles, piece


# how a tile is finished: what is added to its accumulator, where it is rounded, and where it goes


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _known(value: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """A multiple of ``UNIT``, written so that the compiler sees it (a hint on an argument is lost)."""
    return value // UNIT * UNIT if UNIT > 1 else value


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pointer_to(address: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """A pointer to elements of 2 bytes whose address is a multiple of ``UNIT`` of them."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 2 * UNIT)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _halves(whole: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """The left and the right columns: registers are renamed, nothing moves."""
    return tl.split(tl.permute(tl.reshape(whole, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_parts(
    own: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    n: tl.tensor,
    parts: tl.tensor,
    part_bytes: tl.tensor,
    part_shift: tl.tensor,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """The parts of all ranks in their order, with the accumulator in the place of this rank's."""
    at = (rows - part_shift).to(tl.int64)[:, None] * n + columns[None, :]
    total = own
    for k in tl.static_range(NUM_PARTS):
        part = _pointer_to(parts + k * part_bytes, KIND, UNIT) + at
        each = own if k == RANK else tl.load(part, mask=inside).to(tl.float32)
        total = each if k == 0 else total + each
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _finish_tile(
    own: tl.tensor,
    row: tl.tensor,
    row_end: tl.tensor,
    column: tl.tensor,
    n: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    out_shift: tl.tensor,
    also: tl.tensor,
    also_offset: tl.tensor,
    parts: tl.tensor,
    part_bytes: tl.tensor,
    part_shift: tl.tensor,
    bias: tl.tensor,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_ALSO: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Adds what is to be added to some columns of a tile, rounds once, and stores."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows < row_end)[:, None] & (columns < n)[None, :]
    total = own
    if NUM_PARTS > 0:
        total = _add_parts(own, rows, columns, inside, n, parts, part_bytes, part_shift, KIND, RANK, NUM_PARTS, UNIT)
    if HAS_BIAS:
        added = tl.load(_pointer_to(bias, KIND, UNIT) + columns, mask=columns < n, other=0.0)
        total += added.to(tl.float32)[None, :]
    rounded = total.to(KIND)
    to = (rows - out_shift).to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(_pointer_to(out, KIND, UNIT) + to, rounded, mask=inside)
    for k in tl.static_range(NUM_ALSO):
        other = tl.load(also.to(tl.pointer_type(tl.int64)) + k) + also_offset
        tl.store(_pointer_to(other, KIND, UNIT) + to, rounded, mask=inside)


# the product


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _multiply_by_descriptor(
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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _multiply_by_pointer(
    a: tl.tensor,
    b: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    IS_B_TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """For what a descriptor cannot describe: rows or addresses that are no multiples of 16 bytes."""
    total = tl.zeros((BM, BN), tl.float32)
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    depths = tl.arange(0, BK)
    left_at = a + rows.to(tl.int64)[:, None] * a_stride
    in_rows, in_columns = (rows < m)[:, None], (columns < n)[None, :]
    for step in tl.range(0, tl.cdiv(k, BK)):
        at = step * BK + depths
        left = tl.load(left_at + at[None, :], mask=in_rows & (at < k)[None, :], other=0.0)
        if IS_B_TRANSPOSED:
            right_at = b + columns.to(tl.int64)[None, :] * b_stride + at[:, None]
        else:
            right_at = b + at.to(tl.int64)[:, None] * b_stride + columns[None, :]
        right = tl.load(right_at, mask=in_columns & (at < k)[:, None], other=0.0)
        total = tl.dot(left, right, total)
    return total


def _product(
    a: tl.tensor,
    b: tl.tensor,
    m: tl.int32,
    n: tl.int32,
    k: tl.int32,
    a_stride: tl.int64,
    b_stride: tl.int64,
    table: tl.int64,
    first: tl.int32,
    end: tl.int32,
    counters: tl.int64,
    out: tl.int64,
    out_stride: tl.int64,
    out_shift: tl.int32,
    also: tl.int64,
    also_offset: tl.int64,
    parts: tl.int64,
    part_bytes: tl.int64,
    part_shift: tl.int32,
    bias: tl.int64,
    KIND: tl.constexpr,
    IS_BY_DESCRIPTOR: tl.constexpr,
    IS_B_TRANSPOSED: tl.constexpr,
    IN_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SIGNALS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_ALSO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NUM_CUTS: tl.constexpr,
) -> None:
    if not IS_BY_DESCRIPTOR:
        a, b = _pointer_to(a.to(tl.int64), KIND, IN_UNIT), _pointer_to(b.to(tl.int64), KIND, IN_UNIT)
        a_stride, b_stride = _known(a_stride, IN_UNIT), _known(b_stride, IN_UNIT)
        k = _known(k, IN_UNIT)
    WIDTH: tl.constexpr = BN // NUM_CUTS
    n = _known(n, OUT_UNIT)
    part_bytes = _known(part_bytes, 2 * OUT_UNIT)
    entries = table.to(tl.pointer_type(tl.int32))
    words = counters.to(tl.pointer_type(tl.int32))
    tile = first + tl.program_id(0)
    entry = entries + min(tile, end - 1) * _ENTRY
    row, row_end, across = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    piece = tl.load(entry + 3)
    for tile in tl.range(first + tl.program_id(0), end, tl.num_programs(0), flatten=False):
        # Where the next tile lies is asked for now, and known when this one is done.
        entry = entries + min(tile + tl.num_programs(0), end - 1) * _ENTRY
        next_row, next_row_end, next_across = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        next_piece = tl.load(entry + 3)
        column = across * BN
        if IS_BY_DESCRIPTOR:
            own = _multiply_by_descriptor(a, b, row, column, k, IS_B_TRANSPOSED, BM, BN, BK)
        else:
            own = _multiply_by_pointer(a, b, row, column, m, n, k, a_stride, b_stride, IS_B_TRANSPOSED, BM, BN, BK)
        stride = _known(out_stride, OUT_UNIT)
        # A tile is finished in NUM_CUTS cuts of its columns: whole, the parts would not fit into the registers beside it.
        sides = (own,) if NUM_CUTS == 1 else _halves(own, BM, BN)
        for side in tl.static_range(len(sides)):
            cuts = _halves(sides[side], BM, BN // 2) if NUM_CUTS == 4 else (sides[side],)
            for cut in tl.static_range(len(cuts)):
                at = column + (side * len(cuts) + cut) * WIDTH
                _finish_tile(cuts[cut], row, row_end, at, n, out, stride, out_shift, also, also_offset, parts, part_bytes,
                            part_shift, bias, KIND, HAS_BIAS, RANK, NUM_PARTS, NUM_ALSO, OUT_UNIT, BM, WIDTH)  # fmt: skip
        if HAS_SIGNALS:
            tl.debug_barrier()
            tl.atomic_add(words + piece * _WORDS, 1, sem="release", scope="sys")
        row, row_end, across, piece = next_row, next_row_end, next_across, next_piece


def _jit(function: Any) -> Any:
    kinds = function.__annotations__.items()
    return triton.jit(function, do_not_specialize=[name for name, kind in kinds if kind != "tl.constexpr"])


product_kernel = _jit(_product)
