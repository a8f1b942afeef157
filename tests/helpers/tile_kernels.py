"""Runs the kernel of `matmul_signaled` in Triton's interpreter, on CPU memory, against plain torch.

``TRITON_INTERPRET=1 python -m tests.helpers.tile_kernels``
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch

from crossfade.device.driver import HOST
from crossfade.ops.signaled.kernels import product_kernel
from crossfade.ops.signaled.launch import Loader, Product, ProductVariant
from crossfade.ops.signaled.operands import Operands
from crossfade.ops.signaled.tiles import plan_tiles
from tests.helpers.mended_interpreter import mend_the_interpreter
from tests.helpers.tile_worlds import SMALL, Words, by_columns, integers, poisoned, rounded, spaced

KINDS = ("float16", "bfloat16")


def made(a: Any, b: Any, *, has_bias: bool = False, piece_rows: int = 32) -> Product:
    words: Any = Words()
    plan = plan_tiles(len(a), b.shape[1], tile_rows=16, tile_columns=32, piece_rows=piece_rows, swath=2)
    return Product(Loader(HOST), words, Operands.of(a, b), plan, SMALL, has_bias=has_bias)


def one_product(a: Any, b: Any, *, bias: Any = None) -> tuple[Any, Product]:
    """The product of everything; nothing behind it is written."""
    out = poisoned(len(a) + 1, b.shape[1], str(a.dtype).removeprefix("torch."))
    product = made(a, b, has_bias=bias is not None)
    product.launch(0, a, b, out.data_ptr(), 0 if bias is None else bias.data_ptr())
    assert bool(out[len(a) :].isnan().all())
    return out[: len(a)], product


def check_product(kind: str, shape: tuple[int, int, int], is_b_transposed: bool, has_bias: bool) -> None:
    """The values of float64, rounded once; counters at their numbers."""
    m, n, k = shape
    a, b = integers(m, k, kind, 1), integers(k, n, kind, 2)
    if is_b_transposed:
        b = by_columns(b)
    bias = integers(1, n, kind, 3)[0] if has_bias else None
    out, product = one_product(a, b, bias=bias)
    wanted = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert torch.equal(out, rounded(wanted.float(), kind)), (kind, shape, is_b_transposed, has_bias)
    for piece in product.plan.pieces:
        product.counters.wait(0, piece, is_captured=False)


def check_products() -> int:
    """Edges and layouts; the last shapes have rows of which only an operand by columns can be described."""
    wide = [(16, 32, 16), (40, 48, 24), (33, 72, 56), (7, 8, 8), (1, 64, 40)]
    cases = [*itertools.product(KINDS, wide, (False, True), (False, True))]
    cases += [*itertools.product(KINDS, [(35, 50, 40), (17, 33, 24), (5, 2, 8)], (True,), (False, True))]
    chosen = [case for number, case in enumerate(cases) if number % 5 < 3]
    for case in chosen:
        check_product(*case)
    return len(chosen)


def check_constants() -> None:
    """A kernel that was compiled is called with its constants in the order of its arguments."""
    names = list(ProductVariant("float16", False, 8, False, SMALL).constants())
    assert product_kernel.arg_names[-len(names) :] == names


def check_views() -> None:
    """Operands inside larger ones: what lies between their rows is not read."""
    a, b = integers(35, 40, "float16", 1), integers(40, 56, "float16", 2)
    wanted = a.float() @ b.float()
    for left, right in (
        (spaced(a, 8), b),
        (spaced(a, 8), by_columns(b)),
        (spaced(a, 8), spaced(by_columns(b).T, 16).T),
        (torch.cat([a[:1], a])[1:], by_columns(b)),
    ):
        assert torch.equal(one_product(left, right)[0].float(), wanted)


def check_signals() -> None:
    """After every prefix of the tiles: a piece whose counter is at its number is stored whole, and no counter is ahead."""
    m, n, k = 70, 90, 16
    a, b = integers(m, k, "float16", 1), by_columns(integers(k, n, "float16", 2))
    product = made(a, b, piece_rows=16)
    plan, wanted, head = product.plan, a.float() @ b.float(), product._head
    assert head[-1] == plan.num_tiles
    for num_tiles in range(1, plan.num_tiles + 1):
        out = poisoned(m, n, "float16")
        product.counters._words.zero_()
        product._head = (*head[:-1], num_tiles)
        product.launch(0, a, b, out.data_ptr())
        counts = product.counters._words.view(2, len(plan.pieces), -1)
        assert int(counts.sum()) == int(counts[0, :, 0].sum()) == num_tiles
        for piece in plan.pieces:
            done = int(counts[0, piece.counter, 0])
            assert done == min(max(num_tiles - piece.first_tile, 0), piece.num_tiles)
            rows = slice(piece.begin, piece.end)
            assert torch.equal(out[rows].float(), wanted[rows]) is (done == piece.num_tiles)
            assert done or bool(out[rows].isnan().all())


def check_refusals() -> None:
    """Nothing is launched with less alignment than was said."""
    a, b = integers(16, 16, "float16", 1), integers(16, 32, "float16", 2)
    out, product = one_product(a, b)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        product.launch(0, a, b, out.data_ptr() + 2)


def main() -> None:
    mend_the_interpreter()
    check_constants()
    check_views()
    check_signals()
    check_refusals()
    sys.stdout.write(f"{check_products()} products\n")


if __name__ == "__main__":
    main()
