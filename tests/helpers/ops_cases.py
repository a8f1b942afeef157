"""What every rank does in the tests of `crossfade.ops`, on a CPU or with a GPU each, against products in float64."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from crossfade.ops.calls.counts import gather_counts
from crossfade.ops.calls.job import Operator, Shape
from crossfade.ops.choice.candidate import Candidate, candidates_for
from crossfade.ops.operators import matmul_all_to_all_padded
from crossfade.peers.group import PeerGroup
from tests.helpers.ops_inputs import (
    CANDIDATES,
    DTYPES,
    EXACT_K,
    REFERENCES,
    ROUNDS,
    Inputs,
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
from tests.helpers.ranks import Case
from tests.helpers.threads import together


def shapes(device: str) -> None:
    """Every operator, candidate and layout, with odd sizes, fewer rows than ranks and none at all, with and without a bias."""
    sizes = [(1, 1, 1), (2, 3, EXACT_K), (7, 33, 5), (16, 8, 16), (37, 19, EXACT_K), (0, 4, 4), (3, 0, 4), (3, 4, 0)]
    with opened(device) as group:
        for operator in Operator:
            for candidate in CANDIDATES:
                for number, each in enumerate(sizes):
                    inputs = make(operator, group, each, seed=number, has_bias=number % 2 == 0)
                    check(operator, group, inputs, candidate)
                for layout in ("rows", "columns"):
                    inputs = make(operator, group, (11, 13, 7), seed=40, layout=layout, has_bias=layout == "rows")
                    check(operator, group, inputs, candidate)


def types(device: str) -> None:
    with opened(device) as group:
        for operator in Operator:
            for candidate in ("plain", "rounds(rounds=2)"):
                for dtype in DTYPES:
                    for has_bias in (False, True):
                        inputs = make(operator, group, (9, 17, EXACT_K), dtype, seed=5, has_bias=has_bias)
                        check(operator, group, inputs, candidate)


def rounding(device: str) -> None:
    """Real numbers: partial sums are rounded once, and sums of them once; torch.distributed may round each addition."""
    depth, num_ranks = 70, dist.get_world_size()
    with opened(device) as group:
        for operator in Operator:
            for dtype in DTYPES:
                inputs = make(operator, group, (20, 24, depth), dtype, seed=3, is_exact=False, has_bias=True)
                size = expected(operator, absolute(inputs), group.rank)
                unit = torch.finfo(getattr(torch, dtype)).eps
                inner = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps * depth
                for candidate in CANDIDATES:
                    got = call(operator, group, inputs, candidate).double().cpu()
                    error = (got - expected(operator, inputs, group.rank)).abs()
                    assert (error <= size * ((num_ranks + 1) * unit + inner)).all(), f"{operator}, {dtype}, {candidate}"


def small_slots(device: str) -> None:
    """Slots that take a few rows only: there are as many rounds as it needs, on lanes that can be replayed as well."""
    for is_replayable in (False, True):
        num_ranks = dist.get_world_size()
        with opened(device, buffer_bytes=256 * num_ranks, is_replayable=is_replayable) as group:
            for operator in Operator:
                for candidate in ROUNDS:
                    for each in ((19, 16, 16), (4, 64, 8), (31, 5, 3)):
                        check(operator, group, make(operator, group, each, seed=each[0]), candidate)


def operands_and_outputs(device: str) -> None:
    """Leading dimensions, ``a`` that is no row-major matrix, a bias with gaps, outputs that are given, with gaps or without."""
    with opened(device) as group:
        for operator in Operator:
            for candidate in ("plain", "rounds(rounds=2)"):
                for lead in ((2,), (3, 1, 2)):
                    check(operator, group, make(operator, group, (8, 12, 10), lead=lead, has_bias=True), candidate)
                inputs = make(operator, group, (8, 12, 10), seed=1, has_bias=True)
                spread(inputs)
                inputs.a[:] = [each.t().contiguous().t() for each in inputs.a]
                wanted = expected(operator, inputs, group.rank).float().to(device_of(group))
                for out in (torch.full_like(wanted, 7), torch.full((*wanted.shape, 2), 7.0).to(wanted)[..., 0]):
                    assert check(operator, group, inputs, candidate, out=out) is out
                    assert torch.equal(out, wanted)
        inputs = make(Operator.ALL_GATHER, group, (9, 4, 6), seed=2)
        for candidate in CANDIDATES:
            gathered = torch.full((9 * group.num_ranks, 6), 7.0, device=device_of(group))
            check(Operator.ALL_GATHER, group, inputs, candidate, gathered=gathered)
            assert torch.equal(gathered, torch.cat(inputs.a)), candidate


def other_columns(device: str) -> None:
    """Ranks whose ``b`` of an all-gather are not of one width."""
    with opened(device) as group:
        for candidate in CANDIDATES:
            inputs = make(Operator.ALL_GATHER, group, (9, 5, 7), seed=3)
            inputs.b[:] = [each.repeat(1, 1 + rank) for rank, each in enumerate(inputs.b)]
            check(Operator.ALL_GATHER, group, inputs, candidate)


def shared_gathered(device: str) -> None:
    """Rows that the other ranks put where they are wanted, again and again; ``a`` may lie there already. Larger than all slots."""
    with opened(device, buffer_bytes=256 * dist.get_world_size(), heap_bytes=1 << 20) as group:
        shared, own = (
            group.empty(21 * group.num_ranks, 10, dtype=torch.float32),
            slice(group.rank * 21, group.rank * 21 + 21),
        )
        for seed in range(4):
            inputs = make(Operator.ALL_GATHER, group, (21, 6, 10), seed=seed, has_bias=True)
            for candidate in CANDIDATES:
                for is_there in (False, True):
                    for gathered in (shared, torch.empty_like(shared)):
                        gathered.fill_(7)
                        if is_there:
                            inputs.a[group.rank] = gathered[own].copy_(inputs.a[group.rank])
                        check(Operator.ALL_GATHER, group, inputs, candidate, gathered=gathered)
                        assert torch.equal(gathered.cpu(), torch.cat([each.cpu() for each in inputs.a])), candidate
                        inputs.a[group.rank] = inputs.a[group.rank].clone()


def shared_out(device: str) -> None:
    """An output that the other ranks write themselves, again and again."""
    with opened(device, heap_bytes=1 << 20) as group:
        out = group.empty(4, 37, 16, dtype=torch.float32)
        for seed in range(6):
            inputs = make(Operator.ALL_REDUCE, group, (37, 16, EXACT_K), seed=seed, lead=(4,))
            for candidate in CANDIDATES:
                assert check(Operator.ALL_REDUCE, group, inputs, candidate, out=out) is out


def uneven(device: str) -> None:
    """Counts of all kinds: zeros, one rank that gets everything, one that sends nothing, nothing at all."""
    num_ranks = dist.get_world_size()
    draw = random.Random(11)
    drawn = [[[draw.choice((0, 0, 1, 5, 23)) for _ in range(num_ranks)] for _ in range(num_ranks)] for _ in range(6)]
    to_first = [[9] + [0] * (num_ranks - 1) for _ in range(num_ranks)]
    from_last = [[0] * num_ranks] * (num_ranks - 1) + [[3 + p for p in range(num_ranks)]]
    nothing = [[0] * num_ranks] * num_ranks
    with opened(device, buffer_bytes=256 * num_ranks) as group:
        for number, counts in enumerate([*drawn, to_first, from_last, nothing]):
            inputs = make(Operator.ALL_TO_ALL, group, (0, 6, 5), seed=number, counts=counts, has_bias=True)
            assert gather_counts(group, counts[group.rank]) == counts
            for candidate in CANDIDATES:
                check(Operator.ALL_TO_ALL, group, inputs, candidate)


def padded(device: str) -> None:
    """Counts on the device: rooms of one size, of which a part counts."""
    num_ranks, room = dist.get_world_size(), 6
    with opened(device) as group:
        inputs = make(Operator.ALL_TO_ALL, group, (room, 8, 5), seed=1)
        counts = [[(rank + 2 * p) % (room + 1) for p in range(num_ranks)] for rank in range(num_ranks)]
        own = torch.tensor(counts[group.rank], device=device_of(group))
        for candidate in CANDIDATES:
            operands = inputs.a[group.rank], inputs.b[group.rank]
            rows, received = matmul_all_to_all_padded(*operands, group, own, candidate=candidate)
            assert received.tolist() == [row[group.rank] for row in counts]
            assert_equal(rows, expected(Operator.ALL_TO_ALL, inputs, group.rank), candidate)


def same_bits(device: str) -> None:
    """The same candidate gives the same bits each time, and by rounds all ranks get the same sum."""
    with opened(device) as group:
        for operator in Operator:
            for dtype in ("bfloat16", "float32"):
                inputs = make(operator, group, (21, 16, 64), dtype, seed=9, is_exact=False)
                for candidate in CANDIDATES:
                    first = call(operator, group, inputs, candidate).clone()
                    for _ in range(2):
                        assert torch.equal(first, call(operator, group, inputs, candidate)), f"{operator}, {candidate}"
                    if operator is Operator.ALL_REDUCE and candidate in ROUNDS:
                        rows = [torch.empty_like(first) for _ in range(group.num_ranks)]
                        dist.all_gather(rows, first)
                        assert all(torch.equal(first, row) for row in rows), candidate


def references(device: str) -> None:
    """The plain references give what they should."""
    with opened(device) as group:
        for operator, function in REFERENCES.items():
            for counts in (None, [[p + q for q in range(group.num_ranks)] for p in range(group.num_ranks)]):
                if counts is not None and operator is not Operator.ALL_TO_ALL:
                    continue
                inputs = make(operator, group, (6, 10, 12), seed=4, has_bias=True, counts=counts, layout="columns")
                assert inputs.bias is not None
                more = {} if counts is None else {"counts": counts}
                operands = inputs.a[group.rank], inputs.b[group.rank]
                got = function(*operands, group, bias=inputs.bias[group.rank], **more)
                assert_equal(got, expected(operator, inputs, group.rank), f"reference of {operator}")


def offered(device: str) -> None:
    """What `candidates_for` names runs, and all ranks name the same."""
    with opened(device, buffer_bytes=4096) as group:
        for operator in Operator:
            for sizes in ((64, 128, 8), (3, 5, 7), (1000, 16, 16)):
                inputs = make(operator, group, sizes)
                num_rows = len(inputs.a[group.rank]) * (group.num_ranks if operator is Operator.ALL_GATHER else 1)
                shape = Shape(operator, num_rows, *sizes[1:], "float32", "nn", group.num_ranks)
                found = candidates_for(shape, group)
                assert str(found[0]) == "plain"
                assert len(set(found)) == len(found)
                for candidate in found:
                    assert Candidate.parse(str(candidate)) == candidate
                    check(operator, group, inputs, str(candidate))


def without_a_candidate(device: str) -> None:
    """The tuner's choice, by the model; the ranks agree also where torch.distributed does not know them."""
    with opened(device, num_lanes=2) as group:
        process_group = group._process_group
        for operator in Operator:
            for number, sizes in enumerate(((64, 128, 8), (3, 5, 7), (0, 4, 4), (3, 0, 4), (3, 4, 0))):
                check(operator, group, make(operator, group, sizes, seed=number, has_bias=True), None, lane=number % 2)
        counts = [[p + 2 * q for q in range(group.num_ranks)] for p in range(group.num_ranks)]
        check(Operator.ALL_TO_ALL, group, make(Operator.ALL_TO_ALL, group, (0, 6, 5), counts=counts), None)
        group.belongings.clear()
        group._process_group = None
        if group.num_ranks > 1:
            for operator in Operator:
                check(operator, group, make(operator, group, (5, 7, 3)), None)
        group._process_group = process_group


def random_calls(device: str, num_calls: int = 80, seed: int = 0) -> None:
    """One operator after the other, of all kinds, on three lanes."""
    draw = random.Random(seed)
    with opened(device, buffer_bytes=2048, num_lanes=3) as group:
        for number in range(num_calls):
            operator = draw.choice(list(Operator))
            sizes = draw.choice((1, 3, 12, 40)), draw.choice((1, 8, 17, 64)), draw.choice((1, 9, EXACT_K))
            counts = None
            if operator is Operator.ALL_TO_ALL and draw.random() < 0.7:
                ranks = range(group.num_ranks)
                counts = [[draw.choice((0, 1, 7, 20)) for _ in ranks] for _ in ranks]
            layout, dtype = draw.choice(("rows", "columns")), draw.choice(DTYPES)
            has_bias, candidate, lane = draw.random() < 0.5, draw.choice(CANDIDATES), draw.randrange(3)
            inputs = make(operator, group, sizes, dtype, seed=number, layout=layout, has_bias=has_bias, counts=counts)
            check(operator, group, inputs, candidate, lane=lane)


def two_in_flight(device: str) -> None:
    """Two operators at once on two lanes: two threads on a CPU, two streams on a GPU."""
    with opened(device, buffer_bytes=8192, num_lanes=2) as group:
        work = [
            [make(operator, group, (33, 20, EXACT_K), seed=10 * lane + k) for k, operator in enumerate(Operator)]
            for lane in range(2)
        ]
        if device == "cpu":
            _two_threads(group, work)
        else:
            _two_streams(group, work)


def _two_threads(group: PeerGroup, work: list[list[Inputs]]) -> None:
    def run(lane: int) -> None:
        for _ in range(3):
            for operator, inputs in zip(Operator, work[lane], strict=True):
                check(operator, group, inputs, ROUNDS[lane], lane=lane)

    together(run, range(2))


def _two_streams(group: PeerGroup, work: list[list[Inputs]]) -> None:
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    got = []
    for _ in range(50):
        for lane, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for operator, inputs in zip(Operator, work[lane], strict=True):
                    got.append((lane, operator, inputs, call(operator, group, inputs, ROUNDS[lane], lane=lane)))
    torch.cuda.synchronize()
    group.check()
    for lane, operator, inputs, value in got:
        assert_equal(value, expected(operator, inputs, group.rank), f"{operator} on lane {lane}")


def replays(device: str) -> None:
    """All operators captured into one graph, on two lanes, and replayed with other operands; outputs are poisoned before."""
    candidates = ("plain", *ROUNDS[:2]) if dist.get_backend() == "nccl" else ("rounds", "rounds(rounds=3)")
    with opened(device, num_lanes=2, is_replayable=True) as group:
        inputs = [make(operator, group, (18, 12, EXACT_K), seed=1) for operator in Operator]
        pairs = [(operator, each, name) for operator, each in zip(Operator, inputs, strict=True) for name in candidates]
        outs = [torch.empty_like(call(*_first(pair, group))) for pair in pairs]

        def body() -> None:
            for number, ((operator, each, name), out) in enumerate(zip(pairs, outs, strict=True)):
                call(operator, group, each, name, out=out, lane=number % 2)

        launch, drop = captured(group, body)
        for seed in range(5):
            for operator, each in zip(Operator, inputs, strict=True):
                fresh = make(operator, group, (18, 12, EXACT_K), seed=20 + seed)
                each.a[group.rank].copy_(fresh.a[group.rank])
                others = [k for k in range(group.num_ranks) if k != group.rank]
                for k in others:
                    each.a[k].copy_(fresh.a[k])
            for out in outs:
                out.fill_(torch.nan)
            launch()
            group.check()
            for (operator, each, name), out in zip(pairs, outs, strict=True):
                assert_equal(out, expected(operator, each, group.rank), f"replay {seed} of {operator}, {name}")
        drop()


def _first(pair: tuple[Operator, Inputs, str], group: PeerGroup) -> tuple[Operator, PeerGroup, Inputs, str]:
    return pair[0], group, pair[1], pair[2]


def counters(device: str) -> None:
    """A lane counts what goes over it."""
    with opened(device) as group:
        others, rows, columns = group.num_ranks - 1, 8, 4
        call(Operator.REDUCE_SCATTER, group, make(Operator.REDUCE_SCATTER, group, (rows, columns, 2)), "rounds")
        seen = group.lane().statistics()
        assert (seen.num_calls, seen.num_exchanges, seen.num_bytes) == (1, 1, others * rows * columns * 4)
        call(Operator.ALL_TO_ALL, group, make(Operator.ALL_TO_ALL, group, (rows, columns, 2)), "rounds(rounds=2)")
        assert group.lane().statistics() == (2, 3, 2 * seen.num_bytes)
        call(Operator.ALL_REDUCE, group, make(Operator.ALL_REDUCE, group, (rows, columns, 2)), "plain")
        assert group.lane().statistics().num_calls == 2


def large(device: str) -> None:
    """More than one tile, wave and chunk: what small sizes do not show on a GPU."""
    with opened(device, buffer_bytes=16 << 20) as group:
        for operator in Operator:
            for dtype in ("bfloat16", "float16"):
                inputs = make(operator, group, (1024, 2048, 64), dtype, seed=2, layout="columns")
                inputs.a[:] = [each * (torch.arange(64, device=each.device) < EXACT_K) for each in inputs.a]
                for candidate in CANDIDATES:
                    check(operator, group, inputs, candidate)


CASES: dict[str, Case] = {
    each.__name__: each
    for each in (
        shapes,
        types,
        rounding,
        small_slots,
        operands_and_outputs,
        shared_out,
        shared_gathered,
        other_columns,
        uneven,
        padded,
        same_bits,
        references,
        offered,
        without_a_candidate,
        random_calls,
        two_in_flight,
        replays,
        counters,
    )
}
"""On a CPU and on GPUs."""
GPU_CASES: dict[str, Case] = {**CASES, "large": large}
LONG_CASES: dict[str, Case] = {
    **{f"random calls {seed}": partial(random_calls, num_calls=3000, seed=seed) for seed in range(1, 4)}
}
