"""What every rank does in the tests of `crossfade.ops.prepare`, on a CPU or with a GPU each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from crossfade.errors import DeviceError
from crossfade.ops.ahead import prepare, prepare_call
from crossfade.ops.calls.job import Operator, Shape, refuse_in_capture
from crossfade.ops.choice.cache import Source
from crossfade.ops.choice.candidate import Candidate, candidates_for
from crossfade.ops.tuning import tuner_of
from crossfade.peers.group import PeerGroup
from tests.helpers.ops_inputs import (
    EXACT_K,
    FUNCTIONS,
    ROUNDS,
    Inputs,
    assert_equal,
    call,
    captured,
    check,
    device_of,
    expected,
    make,
    opened,
)

SIZES = (18, 12, EXACT_K)


def whole_rows(operator: Operator, group: PeerGroup, rows: int) -> int:
    """M, as `Shape` counts it."""
    return rows if operator is Operator.ALL_REDUCE else rows * group.num_ranks


def refresh(inputs: Inputs, fresh: Inputs) -> None:
    for old, new in zip(inputs.a, fresh.a, strict=True):
        old.copy_(new)


def hold(
    device: str, operator: Operator, candidate: str, sizes: tuple[int, int, int] = SIZES, dtype: str = "float32"
) -> None:
    """Prepared in a new group, captured by the first call of that shape, and replayed with other operands."""
    with opened(device, is_replayable=True) as group:
        m, (n, k) = whole_rows(operator, group, sizes[0]), sizes[1:]
        assert prepare(FUNCTIONS[operator], group, m=m, n=n, k=k, dtype=dtype, candidate=candidate) == Candidate.parse(
            candidate
        )
        inputs = make(operator, group, sizes, dtype, seed=1, layout="columns")
        shape = tuple(expected(operator, inputs, group.rank).shape)
        out = torch.full(shape, torch.nan, dtype=getattr(torch, dtype), device=device_of(group))
        launch, drop = captured(group, partial(call, operator, group, inputs, candidate, out=out))
        for seed in range(3):
            refresh(inputs, make(operator, group, sizes, dtype, seed=20 + seed, layout="columns"))
            out.fill_(torch.nan)
            if device == "cuda":
                torch.cuda.synchronize()
            launch()
            group.check()
            assert_equal(out, expected(operator, inputs, group.rank), f"{seed}: {operator}, {candidate}")
        drop()


def captured_at_once(device: str) -> None:
    """Each candidate of each operator."""
    for operator in Operator:
        for candidate in ("plain", *ROUNDS):
            hold(device, operator, candidate)


def captured_offers(device: str) -> None:
    """Whatever is offered for a shape that all ways can do."""
    sizes = (256, 128, EXACT_K)
    for operator in Operator:
        with opened(device) as group:
            m, (n, k) = whole_rows(operator, group, sizes[0]), sizes[1:]
            offers = candidates_for(Shape(operator, m, n, k, "bfloat16", "nt", group.num_ranks), group)
        for candidate in offers:
            hold(device, operator, str(candidate), sizes, "bfloat16")


def without_a_candidate(device: str) -> None:
    """The tuner's choice is prepared and told; calls without a candidate then make it too, inside a capture."""
    with opened(device, num_lanes=2, is_replayable=True) as group:
        for operator in Operator:
            m, (n, k) = whole_rows(operator, group, SIZES[0]), SIZES[1:]
            shape = Shape(operator, m, n, k, "float32", "nt", group.num_ranks)
            chosen = prepare(str(operator), group, m=m, n=n, k=k, dtype=torch.float32, has_bias=True, lane=1)
            assert chosen == tuner_of(group).choose(shape)
            inputs = make(operator, group, SIZES, seed=2, layout="columns", has_bias=True)
            out = torch.zeros(tuple(expected(operator, inputs, group.rank).shape)).to(device_of(group))
            launch, drop = captured(group, partial(call, operator, group, inputs, None, out=out, lane=1))
            launch()
            assert_equal(out, expected(operator, inputs, group.rank), f"{operator}, {chosen}")
            drop()


def measured(device: str) -> None:
    """With measuring, the bucket's decision is a measured one, on all ranks, and is what calls ask."""
    with opened(device) as group:
        shape = Shape(Operator.ALL_REDUCE, 64, 32, 16, "float32", "nt", group.num_ranks)
        chosen = prepare(shape.operator, group, m=64, n=32, k=16, dtype="float32", is_measured=True)
        assert tuner_of(group).decide(shape).source is Source.MEASURED
        assert chosen == tuner_of(group).choose(shape)


def own_operands(device: str) -> None:
    """Outputs in memory that all ranks can write, counts, leading dimensions: what calls are given, and the result."""
    with opened(device, heap_bytes=1 << 20) as group:
        out = group.empty(4, 37, 16, dtype=torch.float32)
        inputs = make(Operator.ALL_REDUCE, group, (37, 16, EXACT_K), lead=(4,))
        a, b = inputs.a[group.rank], inputs.b[group.rank]
        prepare_call("matmul_all_reduce", a, b, group, out=out, candidate="rounds(rounds=2)")
        assert_equal(out, expected(Operator.ALL_REDUCE, inputs, group.rank), "prepared")
        gathered = group.empty(21 * group.num_ranks, 10, dtype=torch.float32)
        inputs = make(Operator.ALL_GATHER, group, (21, 6, 10))
        a, b = inputs.a[group.rank], inputs.b[group.rank]
        prepare_call(FUNCTIONS[Operator.ALL_GATHER], a, b, group, gathered=gathered, candidate="rounds")
        assert torch.equal(gathered.cpu(), torch.cat([each.cpu() for each in inputs.a]))
        counts = [[p + 2 * q for q in range(group.num_ranks)] for p in range(group.num_ranks)]
        prepare(Operator.ALL_TO_ALL, group, m=0, n=6, k=5, dtype="float32", layout="nn", counts=counts)
        check(Operator.ALL_TO_ALL, group, make(Operator.ALL_TO_ALL, group, (0, 6, 5), counts=counts), None)
        for operator in Operator:  # nothing to do
            assert str(prepare(operator, group, m=0, n=4, k=4, dtype="float32")) == "plain"


def gradients(device: str) -> None:
    """They are gone once, for all operands, and what was given besides stays as it is."""
    with opened(device) as group:
        for operator in Operator:
            for candidate in ("plain", "rounds(rounds=2)"):
                inputs = make(operator, group, SIZES, seed=3, has_bias=True)
                assert inputs.bias is not None
                a, b, bias = inputs.a[group.rank], inputs.b[group.rank], inputs.bias[group.rank]
                out = torch.zeros(tuple(expected(operator, inputs, group.rank).shape)).to(device_of(group))
                before = group.lane().statistics().num_calls
                prepare_call(operator, a, b, group, bias=bias, out=out, candidate=candidate, has_gradient=True)
                assert_equal(out, expected(operator, inputs, group.rank), f"{operator}, {candidate}")
                assert (a.grad, b.grad, bias.grad) == (None, None, None)
                num_calls = group.lane().statistics().num_calls - before
                wants = {"plain": 0, "rounds(rounds=2)": 2}[candidate]
                assert num_calls >= wants, f"{operator}, {candidate}: {num_calls} calls"
        m = whole_rows(Operator.REDUCE_SCATTER, group, SIZES[0])
        prepare(Operator.REDUCE_SCATTER, group, m=m, n=4, k=4, dtype="float32", has_bias=True, has_gradient=True)


def too_late(device: str) -> None:
    """In a capture nothing is prepared, and ways can refuse by name to begin with it."""
    with opened(device, is_replayable=True) as group:

        def body() -> None:
            with pytest.raises(DeviceError, match=r"being captured\nhint: prepare\(\) the operator"):
                prepare("matmul_all_reduce", group, m=4, n=4, k=4)
            with pytest.raises(DeviceError, match=r"a kernel is to be loaded, .*captured\nhint: prepare\(\)"):
                refuse_in_capture(group, "a kernel is to be loaded")

        captured(group, body)[1]()
        refuse_in_capture(group, "a kernel is to be loaded")


CASES: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (
        captured_at_once,
        captured_offers,
        without_a_candidate,
        measured,
        own_operands,
        gradients,
        too_late,
    )
}
