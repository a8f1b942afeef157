"""The candidate ``fused`` on GPUs, against exact products: torch has its fused operators for these alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from crossfade.ops.candidate import Candidate, candidates_for
from crossfade.ops.shape import Operator, Shape
from tests.helpers.ops_inputs import EXACT_K, assert_equal, call, check, expected, make, opened

OPERATORS = (Operator.REDUCE_SCATTER, Operator.ALL_GATHER)
SIZES = ((8, 16, EXACT_K), (64, 48, EXACT_K), (1024, 512, 16), (3, 8, 5))


def fused_shapes(device: str) -> None:
    """Types, layouts, a bias, outputs that are given, lanes that have none."""
    with opened(device, num_lanes=2) as group:
        for operator in OPERATORS:
            shape = Shape(operator, 64 * group.num_ranks, 32, 16, "bfloat16", "nn", group.num_ranks)
            assert Candidate("fused") in candidates_for(shape, group)
            for number, sizes in enumerate(SIZES):
                for dtype in ("bfloat16", "float16", "float32"):
                    for layout in ("rows", "columns"):
                        inputs = make(
                            operator, group, sizes, dtype, seed=number, layout=layout, has_bias=number % 2 == 1
                        )
                        check(operator, group, inputs, "fused")
                        check(operator, group, inputs, "fused", lane=1)
                        wanted = expected(operator, inputs, group.rank)
                        out = torch.full(tuple(wanted.shape), 7.0, dtype=inputs.a[0].dtype, device=inputs.a[0].device)
                        assert check(operator, group, inputs, "fused", out=out) is out


def fused_gathered(device: str) -> None:
    """The rows too, few and many."""
    with opened(device) as group:
        for rows in (5, 4096):
            inputs = make(Operator.ALL_GATHER, group, (rows, 16, EXACT_K), seed=rows)
            gathered = torch.full((rows * group.num_ranks, EXACT_K), 7.0, device=inputs.a[0].device)
            check(Operator.ALL_GATHER, group, inputs, "fused", gathered=gathered)
            assert torch.equal(gathered, torch.cat(inputs.a))


def fused_replays(device: str) -> None:
    """Captured behind a call by itself; larger shapes come between the replays, and operands change."""
    with opened(device, is_replayable=True) as group:
        work = [(operator, make(operator, group, (64, 48, EXACT_K), "bfloat16", seed=1)) for operator in OPERATORS]
        outs = [torch.empty_like(call(operator, group, inputs, "fused")) for operator, inputs in work]
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for (operator, inputs), out in zip(work, outs, strict=True):
                call(operator, group, inputs, "fused", out=out)
        for seed in range(4):
            check(
                Operator.REDUCE_SCATTER,
                group,
                make(Operator.REDUCE_SCATTER, group, (256 << seed, 64, 8), seed=seed),
                "fused",
            )
            for (operator, inputs), out in zip(work, outs, strict=True):
                fresh = make(operator, group, (64, 48, EXACT_K), "bfloat16", seed=50 + seed)
                for mine, new in zip(inputs.a, fresh.a, strict=True):
                    mine.copy_(new)
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            group.check()
            for (operator, inputs), out in zip(work, outs, strict=True):
                assert_equal(out, expected(operator, inputs, group.rank), f"replay {seed} of {operator}")
        graph.reset()


def fused_again(device: str) -> None:
    """The same tensors again and again, on a lane that can be replayed: outputs are new ones, which lie where the last one lay, or
    are kept; a bias comes and goes; and torch's memory grows in between.
    """
    with opened(device, is_replayable=True) as group:
        for operator in OPERATORS:
            inputs = make(operator, group, (64, 48, EXACT_K), "bfloat16", seed=1, has_bias=True)
            bare, kept = replace(inputs, bias=None), []
            for number in range(12):
                fresh = make(operator, group, (64, 48, EXACT_K), "bfloat16", seed=20 + number)
                for mine, new in zip(inputs.a, fresh.a, strict=True):
                    mine.copy_(new)
                each = inputs if number % 3 == 2 else bare
                out = check(operator, group, each, "fused")
                if number > 8:
                    kept.append((out, expected(operator, each, group.rank)))
                del out
                if number == 5:
                    check(operator, group, make(operator, group, (1024, 64, 8), "bfloat16", seed=3), "fused")
            for number, (out, wanted) in enumerate(kept):
                assert_equal(out, wanted, f"output {number} of {operator}, which was kept")


CASES: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (fused_shapes, fused_gathered, fused_replays, fused_again)
}
