"""How a tile is finished: what is added to its accumulator, where it is rounded, and where it goes (docstring of kernels.py)."""

from __future__ import annotations

from crossfade.errors import MissingDependency

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingDependency("triton", extra="gpu", needed_for="tile operators") from None

__all__ = ["finish_tile", "halves", "known", "pointer_to", "prefetch_parts"]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def known(value: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """A multiple of ``UNIT``, written so that the compiler sees it (a hint on an argument is lost)."""
    return value // UNIT * UNIT if UNIT > 1 else value


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def pointer_to(address: tl.tensor, KIND: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """A pointer to elements of 2 bytes whose address is a multiple of ``UNIT`` of them."""
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), 2 * UNIT)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def halves(whole: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
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
        part = pointer_to(parts + k * part_bytes, KIND, UNIT) + at
        each = own if k == RANK else tl.load(part, mask=inside).to(tl.float32)
        total = each if k == 0 else total + each
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def prefetch_parts(
    row: tl.tensor,
    row_end: tl.tensor,
    column: tl.tensor,
    n: tl.tensor,
    parts: tl.tensor,
    part_bytes: tl.tensor,
    part_shift: tl.tensor,
    PREFETCH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    """Asks for a tile of every other rank's part to be brought into the L2 cache while the tile is multiplied."""
    if column + BN <= n:
        rows = tl.minimum(row + tl.arange(0, BM), row_end - 1) - part_shift
        at = (rows.to(tl.int64) * n + column) * 2
        for k in tl.static_range(NUM_PARTS):
            if k != RANK:
                tl.inline_asm_elementwise(
                    PREFETCH, "=r,l", [parts + k * part_bytes + at], dtype=tl.int32, is_pure=False, pack=1
                )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def finish_tile(
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
        added = tl.load(pointer_to(bias, KIND, UNIT) + columns, mask=columns < n, other=0.0)
        total += added.to(tl.float32)[None, :]
    rounded = total.to(KIND)
    to = (rows - out_shift).to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(pointer_to(out, KIND, UNIT) + to, rounded, mask=inside)
    for k in tl.static_range(NUM_ALSO):
        other = tl.load(also.to(tl.pointer_type(tl.int64)) + k) + also_offset
        tl.store(pointer_to(other, KIND, UNIT) + to, rounded, mask=inside)
