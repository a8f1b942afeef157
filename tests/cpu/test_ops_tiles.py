"""The candidate ``tiles`` between processes, on CPU tensors and in Triton's interpreter, against float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

import torch
import torch.distributed as dist

from crossfade.ops.calls.job import Operator
from tests.helpers.ops_inputs import (
    EXACT_K,
    absolute,
    assert_equal,
    call,
    captured,
    check,
    device_of,
    expected,
    make,
    opened,
    spread,
)
from tests.helpers.ranks import suite
from tests.helpers.triton_programs import needs_triton

SUMS = (Operator.REDUCE_SCATTER, Operator.ALL_REDUCE)
TILES = ("tiles", "tiles(group_rows=128)", "tiles(rounds=2)", "tiles(rounds=3, group_rows=128)")
KINDS = ("bfloat16", "float16")


def _some(device: str, items: Sequence[Any], first: int, step: int) -> Sequence[Any]:
    """All of them on GPUs; each ``step``-th one on a CPU."""
    return items if device != "cpu" else items[first % step :: step]


def tile_shapes(device: str) -> None:
    """Odd sizes, more and fewer rows of tiles than rounds, fewer rows than ranks; both layouts, with and without a bias, which has
    gaps at times.
    """
    sizes = [(1, 8, 16), (3, 24, EXACT_K), (37, 19, EXACT_K), (150, 16, 8), (300, 264, EXACT_K)]
    with opened(device) as group:
        for place, (operator, candidate) in enumerate(product(SUMS, TILES)):
            for number, each in _some(device, list(enumerate(sizes)), place, 3):
                layout, kind = ("rows", "columns")[number % 2], KINDS[(number + len(candidate)) % 2]
                inputs = make(operator, group, each, kind, seed=number, layout=layout, has_bias=number % 3 == 0)
                if number == 3:
                    spread(inputs)
                check(operator, group, inputs, candidate)


def tile_rounding(device: str) -> None:
    """Real numbers: parts are rounded once, the own one is not, and sums of them once. The same bits each time."""
    depth, num_ranks = 70, dist.get_world_size()
    with opened(device) as group:
        for place, (operator, dtype) in enumerate(product(SUMS, KINDS)):
            inputs = make(operator, group, (140, 24, depth), dtype, seed=3, is_exact=False, has_bias=True)
            size = expected(operator, absolute(inputs), group.rank)
            unit, inner = torch.finfo(getattr(torch, dtype)).eps, torch.finfo(torch.float32).eps * depth
            for candidate in _some(device, TILES, place, 4):
                first, second = (call(operator, group, inputs, candidate) for _ in range(2))
                assert torch.equal(first, second), f"{operator}, {dtype}, {candidate}"
                error = (first.double().cpu() - expected(operator, inputs, group.rank)).abs()
                assert (error <= size * ((num_ranks + 1) * unit + inner)).all(), f"{operator}, {dtype}, {candidate}"


def tile_shared_out(device: str) -> None:
    """An output that the other ranks write themselves, again and again, from poison."""
    with opened(device, heap_bytes=1 << 20) as group:
        out = group.empty(300, 16, dtype=torch.bfloat16)
        for seed in range(4):
            inputs = make(Operator.ALL_REDUCE, group, (300, 16, EXACT_K), "bfloat16", seed=seed)
            for candidate in _some(device, TILES, seed, 4):
                out.fill_(torch.nan)
                group.barrier()
                assert check(Operator.ALL_REDUCE, group, inputs, candidate, out=out) is out


def tile_random_calls(device: str, seed: int = 0) -> None:
    """Tiles and other candidates in one row, on lanes that can be replayed or not; outputs from poison."""
    draw, num_calls = random.Random(seed), 16 if device == "cpu" else 60
    for is_replayable in (False, True):
        with opened(device, num_lanes=2, is_replayable=is_replayable) as group:
            for number in range(num_calls // 2):
                operator, candidate = draw.choice(list(Operator)), draw.choice(("rounds(rounds=2)", "plain"))
                if operator in SUMS and draw.random() < 0.8:
                    candidate = draw.choice(TILES)
                sizes = draw.choice((5, 130, 260)), draw.choice((8, 40)), draw.choice((8, EXACT_K))
                inputs = make(operator, group, sizes, draw.choice(KINDS), seed=number, has_bias=draw.random() < 0.5)
                wanted = expected(operator, inputs, group.rank)
                out = torch.full_like(wanted, torch.nan).to(inputs.a[0].dtype).to(device_of(group))
                check(operator, group, inputs, candidate, lane=draw.randrange(2), out=out)


def tile_replays(device: str) -> None:
    """Both sums captured into one graph, on two lanes, and replayed with other operands; outputs are poisoned before."""
    with opened(device, num_lanes=2, is_replayable=True) as group:
        pairs = _some(device, [(operator, name) for operator in SUMS for name in TILES], 1, 2)
        inputs = {operator: make(operator, group, (200, 16, EXACT_K), "bfloat16", seed=1) for operator in SUMS}
        outs = []
        for number, (operator, name) in enumerate(pairs):
            outs.append(torch.empty_like(call(operator, group, inputs[operator], name, lane=number % 2)))

        def body() -> None:
            for number, ((operator, name), out) in enumerate(zip(pairs, outs, strict=True)):
                call(operator, group, inputs[operator], name, out=out, lane=number % 2)

        body()  # outputs may lie otherwise than those of the first calls: their kernels are loaded now
        launch, drop = captured(group, body)
        for seed in range(2 if device == "cpu" else 4):
            for operator in SUMS:
                fresh = make(operator, group, (200, 16, EXACT_K), "bfloat16", seed=20 + seed)
                for mine, new in zip(inputs[operator].a, fresh.a, strict=True):
                    mine.copy_(new)
            for out in outs:
                out.fill_(torch.nan)
            launch()
            group.check()
            for (operator, name), out in zip(pairs, outs, strict=True):
                wanted = expected(operator, inputs[operator], group.rank)
                assert_equal(out, wanted, f"replay {seed} of {operator}, {name}")
        drop()


TILE_CASES: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (tile_shapes, tile_rounding, tile_shared_out, tile_random_calls, tile_replays)
}


_THREE = ("tile_shapes",)

TestTwoRanks = needs_triton(
    suite({name: case for name, case in TILE_CASES.items() if name not in _THREE}, 2, limit_s=120, interprets=True)
)
TestThreeRanks = needs_triton(suite({name: TILE_CASES[name] for name in _THREE}, 3, limit_s=120, interprets=True))
