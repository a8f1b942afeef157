"""Runs the kernels of `crossfade.ops` in Triton's interpreter, on CPU memory, against plain torch.

``TRITON_INTERPRET=1 python -m tests.helpers.tile_kernels``
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch

from crossfade.device.driver import HOST
from crossfade.errors import DeviceError
from crossfade.ops.signaled.kernels import product_kernel
from crossfade.ops.signaled.launch import Epilogue, Loader, Product, ProductVariant, Target
from crossfade.ops.signaled.operands import Operands, find_unit
from crossfade.ops.signaled.tiles import Stretch, TilePlan, even_blocks, plan_tiles, uneven_blocks
from tests.helpers.mended_interpreter import mend_the_interpreter
from tests.helpers.peer_cases import expected, make, same_bits
from tests.helpers.tile_worlds import SMALL, Words, World, by_columns, integers, poisoned, rounded, spaced

KINDS = ("float16", "bfloat16")


def whole(plan: TilePlan) -> Stretch:
    """All tiles of a plan for one rank."""
    return plan.stretch(0, is_own=True)


def one_product(
    a: Any, b: Any, *, bias: Any = None, num_cuts: int = 1, epilogue: Epilogue | None = None, more: int = 0
) -> tuple[Any, Product]:
    """One rank's product of everything, into rows with ``more`` elements between them."""
    (m, _), n = a.shape, b.shape[1]
    kind = str(a.dtype).removeprefix("torch.")
    config = SMALL._replace(num_cuts=num_cuts)
    plan = plan_tiles(n, even_blocks(m, 1), 0, tile_rows=16, tile_columns=32, piece_rows=32, swath=2)
    words: Any = Words()
    out = poisoned(m + 1, n + more, kind)
    product = Product(Loader(HOST), words, Operands.of(a, b), plan, config, out_unit=find_unit(n + more))
    chosen = epilogue or Epilogue(has_bias=bias is not None, has_signals=True)
    product.load(chosen)
    target = Target(out.data_ptr(), n + more)
    product.launch(0, whole(plan), a, b, target, chosen, bias=0 if bias is None else bias.data_ptr())
    assert bool(out[m:].isnan().all())
    assert bool(out[:, n:].isnan().all())
    return out[:m, :n], product


def check_product(kind: str, shape: tuple[int, int, int], is_b_transposed: bool, has_bias: bool, num_cuts: int) -> None:
    """The values of float64, rounded once; counters at their numbers."""
    m, n, k = shape
    a, b = integers(m, k, kind, 1), integers(k, n, kind, 2)
    if is_b_transposed:
        b = by_columns(b)
    bias = integers(1, n, kind, 3)[0] if has_bias else None
    out, product = one_product(a, b, bias=bias, num_cuts=num_cuts, more=8 * num_cuts - 8)
    wanted = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert torch.equal(out, rounded(wanted.float(), kind)), (kind, shape, is_b_transposed, has_bias, num_cuts)
    for piece in product.plan.pieces:
        product.counters.wait(0, piece, is_captured=False)


def check_products() -> int:
    """Edges and layouts; the last shapes have rows of which descriptors know nothing."""
    shapes = [(16, 32, 16), (40, 48, 24), (33, 72, 56), (7, 8, 8), (1, 64, 40), (35, 50, 37), (17, 33, 20), (5, 1, 3)]
    cases = list(itertools.product(KINDS, shapes, (False, True), (False, True), (1, 2, 4)))
    chosen = [case for number, case in enumerate(cases) if (number % 5 < 2 if case[4] == 1 else number % 9 == 0)]
    for case in chosen:
        check_product(*case)
    return len(chosen)


def check_constants() -> None:
    """A kernel that was compiled is called with its constants in the order of its arguments."""
    product = ProductVariant("float16", True, False, 8, 8, False, True, 0, 0, 0, SMALL)
    names = list(product.constants())
    assert product_kernel.arg_names[-len(names) :] == names


def check_views() -> None:
    """Operands inside larger ones: what lies between their rows is not read."""
    a, b = integers(35, 40, "float16", 1), integers(40, 50, "float16", 2)
    wanted = a.float() @ b.float()
    for left, right, is_by_descriptor in (
        (spaced(a, 8), b, False),
        (spaced(a, 8), by_columns(b), True),
        (spaced(a, 8), spaced(by_columns(b).T, 16).T, True),
        (spaced(a, 3), spaced(b, 5), False),
        (torch.cat([a[:1], a])[1:], by_columns(b), True),
        (torch.cat([a.flatten()[:1], a.flatten()])[1:].view(35, 40), by_columns(b), False),
    ):
        assert Operands.of(left, right).is_by_descriptor is is_by_descriptor
        assert torch.equal(one_product(left, right)[0].float(), wanted)


def check_signals() -> None:
    """After every prefix of the tiles: a piece whose counter is at its number is stored whole, and no counter is ahead."""
    m, n, k = 70, 90, 16
    a, b = integers(m, k, "float16", 1), integers(k, n, "float16", 2)
    plan = plan_tiles(n, uneven_blocks([33, 0, 37]), 2, tile_rows=16, tile_columns=32, num_rounds=2, piece_rows=16)
    words: Any = Words()
    product = Product(Loader(HOST), words, Operands.of(a, b), plan, SMALL, out_unit=find_unit(n))
    product.load(Epilogue(has_signals=True))
    wanted = a.float() @ b.float()
    for num_tiles in range(1, plan.num_tiles + 1):
        out = poisoned(m, n, "float16")
        product.counters._words.zero_()
        part = Stretch(0, 0, True, 0, num_tiles, ())
        product.launch(0, part, a, b, Target(out.data_ptr(), n), Epilogue(has_signals=True))
        counts = product.counters._words.view(2, len(plan.pieces), -1)
        assert int(counts.sum()) == int(counts[0, :, 0].sum()) == num_tiles
        for piece in plan.pieces:
            done = int(counts[0, piece.counter, 0])
            assert done == min(max(num_tiles - piece.first_tile, 0), piece.num_tiles)
            rows = slice(piece.begin, piece.end)
            assert torch.equal(out[rows].float(), wanted[rows]) is (done == piece.num_tiles)
            assert done or bool(out[rows].isnan().all())


def check_worlds() -> int:
    """W ranks: reduce-scatter as rounds, pieces and parts, from poisoned memory."""
    worlds = [
        World(even_blocks(64, 2), 64, 24),
        World(even_blocks(64, 4), 40, 16, is_b_transposed=True, bias=integers(1, 40, "float16", 9, 99)[0]),
        World(even_blocks(70, 4), 40, 20, num_rounds=2, piece_rows=16, config=SMALL._replace(num_cuts=1)),
        World(uneven_blocks([20, 0, 49]), 33, 17, num_rounds=3, config=SMALL._replace(num_cuts=2)),
        World(even_blocks(96, 3), 32, 16, kind="bfloat16", num_rounds=2, bias=integers(1, 32, "bfloat16", 9, 99)[0]),
        World(even_blocks(5, 8), 32, 8, is_captured=True, config=SMALL._replace(num_cuts=1)),
    ]
    for world in worlds:
        num_runs = 2 if world is worlds[0] or world.is_captured else 1  # counters go on, or have been reset
        for _ in range(num_runs):
            world.poison()
            world.run()
            world.check()
        num_sent = sum(piece.rank != r for r, p in enumerate(world.products) for piece in p.plan.pieces)
        assert world.driver.num_waits == num_runs * num_sent
        for product in world.products:
            replayed = product.counters._words.view(2, len(product.plan.pieces), -1)[1]
            assert not bool(replayed.any())
    return len(worlds)


def check_order() -> None:
    """Parts are added in the order of the ranks, this rank's accumulator in its place: here another order gives another sum."""
    values = {0: 60000.0, 1: -60000.0, 2: 2.0**-10}
    for rank in range(4):
        world = World(even_blocks(64, 4), 32, 16)
        world.a[rank].fill_(0.5)
        world.b[rank].fill_(0.25)  # an accumulator of 2
        for place, value in zip([p for p in range(4) if p != rank], values.values(), strict=True):
            world.slots[rank].view(4, 16, 32)[place] = value
        world.do_own(rank, 0)
        total = torch.zeros(())
        for k in range(4):
            slot = world.slots[rank].view(4, 16, 32)[k, 0, 0].float()
            total = total + (torch.tensor(2.0) if k == rank else slot)
        out = world.outs[rank][world.blocks[rank].begin : world.blocks[rank].end]
        assert torch.equal(out, total.half().expand_as(out)), rank
    # and as peers.steps do it, when the accumulator needs no rounding
    world = World(even_blocks(64, 4), 32, 16)
    for rank in range(4):
        for k in range(4):
            world.slots[rank].view(4, 16, 32)[k] = make((16, 32), "float16", 7 * rank + k)
        exact = world.a[rank][16 * rank : 16 * rank + 16].float() @ world.b[rank].float()
        assert torch.equal(exact, exact.half().float())
        world.slots[rank].view(4, 16, 32)[rank] = float("nan")
        world.do_own(rank, 0)
        inputs = list(world.slots[rank].view(4, 16, 32).clone())
        inputs[rank] = exact.half()
        found = world.outs[rank][16 * rank : 16 * rank + 16]
        assert same_bits(found, expected("all_reduce", inputs, rank)), rank


def check_several_targets() -> None:
    """A result that goes to several places, each with its own address and one offset."""
    a, b = integers(40, 16, "float16", 1), integers(16, 48, "float16", 2)
    loader = Loader(HOST)
    epilogue = Epilogue(num_also=3)
    others = [poisoned(42, 48, "float16") for _ in range(3)]
    table = loader.table([other.data_ptr() for other in others])
    plan = plan_tiles(48, even_blocks(40, 1), 0, tile_rows=16, tile_columns=32)
    words: Any = Words()
    product = Product(loader, words, Operands.of(a, b), plan, SMALL)
    product.load(epilogue)
    out = poisoned(40, 48, "float16")
    target = Target(out.data_ptr(), 48, also=table.data_ptr(), also_offset=2 * 48 * 2)
    product.launch(0, whole(plan), a, b, target, epilogue)
    assert torch.equal(out.float(), a.float() @ b.float())
    for other in others:
        assert torch.equal(other[2:], out)
        assert bool(other[:2].isnan().all())


def check_refusals() -> None:
    """What was not loaded is not loaded in passing, and nothing is launched with less alignment than was said."""
    a, b = integers(16, 16, "float16", 1), integers(16, 32, "float16", 2)
    out, product = one_product(a, b)
    stretch = whole(product.plan)
    with pytest.raises(DeviceError, match="prepare"):
        product.launch(0, stretch, a, b, Target(out.data_ptr(), 32), Epilogue(num_also=1))
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        product.launch(0, stretch, a, b, Target(out.data_ptr() + 2, 32), Epilogue(has_signals=True))
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        product.launch(0, stretch, a, b, Target(out.data_ptr(), 36), Epilogue(has_signals=True))


def main() -> None:
    mend_the_interpreter()
    check_constants()
    check_views()
    check_signals()
    check_order()
    check_several_targets()
    check_refusals()
    counts = {"products": check_products(), "worlds": check_worlds()}
    sys.stdout.write(", ".join(f"{count} {name}" for name, count in counts.items()) + "\n")


if __name__ == "__main__":
    main()
