"""What every rank does in the tests of the candidate ``kernel``: on a CPU, by torch or Triton's interpreter, or on a GPU each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from crossfade.ops.candidate import Candidate
from crossfade.ops.shape import Operator
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
)

SUMS = (Operator.REDUCE_SCATTER, Operator.ALL_REDUCE)
KERNELS = (
    "kernel",
    "kernel(rounds=2, sms=4, reserve_sms=4)",
    "kernel(rounds=3, taper=2)",
    "kernel(rounds=5, batched=0, sms=8)",
)
KINDS = ("bfloat16", "float16", "float32", "float64")


def kernel_shapes(device: str) -> None:
    """Odd sizes, fewer rows than ranks or rounds, none at all; both layouts, with and without a bias; lanes of both kinds."""
    sizes = [(1, 8, 16), (2, 3, EXACT_K), (37, 19, EXACT_K), (150, 16, 8), (300, 264, EXACT_K), (3, 4, 0), (0, 4, 4)]
    for is_replayable in (False, True):
        with opened(device, buffer_bytes=4 << 20, is_replayable=is_replayable) as group:
            for operator, candidate in product(SUMS, KERNELS):
                for number, each in enumerate(sizes):
                    layout, kind = ("rows", "columns")[number % 2], KINDS[(number + len(candidate)) % 4]
                    inputs = make(operator, group, each, kind, seed=number, layout=layout, has_bias=number % 3 == 0)
                    check(operator, group, inputs, candidate)


def kernel_small_buffers(device: str) -> None:
    """Products that do not fit into a buffer are done in several goes."""
    for is_replayable in (False, True):
        with opened(device, buffer_bytes=256 * dist.get_world_size(), is_replayable=is_replayable) as group:
            for operator, candidate, sizes in product(SUMS, KERNELS, ((19, 16, 16), (4, 64, 8), (31, 5, 3))):
                check(operator, group, make(operator, group, sizes, seed=sizes[0], has_bias=True), candidate)


def kernel_bits(device: str) -> None:
    """Real numbers: parts are rounded once, and sums once. The same bits each time, and, where all get them, on all ranks."""
    depth, num_ranks = 70, dist.get_world_size()
    with opened(device) as group:
        for operator, kind, candidate in product(SUMS, KINDS, KERNELS[:3]):
            inputs = make(operator, group, (140, 24, depth), kind, seed=3, is_exact=False, has_bias=True)
            size, wanted = (expected(operator, each, group.rank) for each in (absolute(inputs), inputs))
            unit = torch.finfo(getattr(torch, kind)).eps
            inner = torch.finfo(torch.float64 if kind == "float64" else torch.float32).eps * depth
            first, second = (call(operator, group, inputs, candidate) for _ in range(2))
            assert torch.equal(first, second), f"{operator}, {kind}, {candidate}"
            error = (first.double().cpu() - wanted).abs()
            assert (error <= size * ((num_ranks + 1) * unit + inner)).all(), f"{operator}, {kind}, {candidate}"
            if operator is Operator.ALL_REDUCE:
                rows = [torch.empty_like(first) for _ in range(group.num_ranks)]
                dist.all_gather(rows, first)
                assert all(torch.equal(first, row) for row in rows), candidate


def kernel_shared_out(device: str) -> None:
    """Sums that the kernels write into all outputs, again and again, from poison."""
    for is_replayable in (False, True):
        with opened(device, heap_bytes=1 << 20, is_replayable=is_replayable) as group:
            out = group.empty(301, 16, dtype=torch.bfloat16)
            for seed, candidate in product(range(2), KERNELS):
                inputs = make(Operator.ALL_REDUCE, group, (301, 16, EXACT_K), "bfloat16", seed=seed)
                out.fill_(torch.nan)
                group.barrier()
                assert check(Operator.ALL_REDUCE, group, inputs, candidate, out=out) is out


def kernel_counts(device: str) -> None:
    """A lane counts what is read of others; a reduce-scatter that can be replayed takes two exchanges."""
    for is_replayable, candidate, num_exchanges in ((False, KERNELS[1], 1), (True, KERNELS[1], 2), (True, "kernel", 2)):
        with opened(device, is_replayable=is_replayable) as group:
            call(Operator.REDUCE_SCATTER, group, make(Operator.REDUCE_SCATTER, group, (8, 4, 2)), candidate)
            assert group.lane().statistics() == (1, num_exchanges, (group.num_ranks - 1) * 8 * 4 * 4)


def kernel_fill(device: str) -> None:
    """Work of the caller's is done once, and behind it nothing has changed."""
    with opened(device, is_replayable=True) as group:
        for operator, candidate in product(SUMS, KERNELS):
            log: list[int] = []
            inputs = make(operator, group, (37, 19, EXACT_K))
            for _ in range(3):
                check(operator, group, inputs, candidate, meanwhile=lambda log=log: log.append(1))
            assert len(log) == 3


def kernel_random_calls(device: str, seed: int = 0, num_calls: int = 60) -> None:
    """This and other candidates in one row, on two lanes that can be replayed or not; outputs from poison."""
    draw = random.Random(seed)
    for is_replayable in (False, True):
        with opened(device, buffer_bytes=1 << 17, num_lanes=2, is_replayable=is_replayable) as group:
            for number in range(num_calls):
                operator, candidate = draw.choice(list(Operator)), draw.choice(("rounds(rounds=2)", "plain"))
                if operator in SUMS and draw.random() < 0.7:
                    candidate = draw.choice(KERNELS)
                sizes = draw.choice((5, 130, 260)), draw.choice((8, 40)), draw.choice((8, EXACT_K))
                inputs = make(operator, group, sizes, draw.choice(KINDS), seed=number, has_bias=draw.random() < 0.5)
                wanted = expected(operator, inputs, group.rank)
                out = torch.full_like(wanted, torch.nan).to(inputs.a[0].dtype).to(device_of(group))
                check(operator, group, inputs, candidate, lane=draw.randrange(2), out=out)


def kernel_replays(device: str) -> None:
    """Both sums captured into one graph, on two lanes, and replayed with other operands; outputs are poisoned before."""
    with opened(device, num_lanes=2, is_replayable=True) as group:
        pairs: Sequence[tuple[Operator, str]] = list(product(SUMS, KERNELS))
        inputs = {operator: make(operator, group, (200, 16, EXACT_K), "bfloat16", seed=1) for operator in SUMS}
        outs = []
        for number, (operator, name) in enumerate(pairs):
            outs.append(torch.empty_like(call(operator, group, inputs[operator], name, lane=number % 2)))

        def body() -> None:
            for number, ((operator, name), out) in enumerate(zip(pairs, outs, strict=True)):
                call(operator, group, inputs[operator], name, out=out, lane=number % 2)

        launch, drop = captured(group, body)
        for seed in range(4):
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


def kernel_late_ranks(device: str) -> None:
    """Calls one behind the other with new inputs, while a rank in turn is late: nobody reads a part too soon or too late."""
    names = [str(Candidate.parse(each)) for each in KERNELS]
    with opened(device, is_replayable=True) as group:
        made = {
            operator: [make(operator, group, (260, 24, EXACT_K), "bfloat16", seed=k) for k in range(3)]
            for operator in SUMS
        }
        got: list[tuple[Operator, Any, torch.Tensor]] = []
        for number, (operator, name) in enumerate([*product(SUMS, names)] * 6):
            if device != "cpu" and number % group.num_ranks == group.rank:
                torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
            inputs = made[operator][number % 3]
            got.append((operator, inputs, call(operator, group, inputs, name)))
        if device != "cpu":
            torch.cuda.synchronize()
        group.check()
        for operator, inputs, value in got:
            assert_equal(value, expected(operator, inputs, group.rank), f"{operator} with late ranks")


KERNEL_CASES: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (
        kernel_shapes,
        kernel_small_buffers,
        kernel_bits,
        kernel_shared_out,
        kernel_counts,
        kernel_fill,
        kernel_random_calls,
        kernel_replays,
        kernel_late_ranks,
    )
}


def kernel_interpreted(device: str) -> None:
    """A few calls, each of which takes Triton's interpreter a part of a second."""
    for is_replayable in (False, True):
        with opened(device, heap_bytes=1 << 20, is_replayable=is_replayable) as group:
            out = group.empty(41, 24, dtype=torch.float16)
            for number, (operator, candidate) in enumerate(product(SUMS, KERNELS)):
                inputs = make(operator, group, (41, 24, EXACT_K), KINDS[number % 4], seed=number, has_bias=True)
                check(operator, group, inputs, candidate)
                assert [type(each).__name__ for each in group.belongings["sums of peers"].values()].count(
                    "_ByTorch"
                ) == 0
            inputs = make(Operator.ALL_REDUCE, group, (41, 24, EXACT_K), "float16", seed=9)
            check(Operator.ALL_REDUCE, group, inputs, KERNELS[1], out=out)
