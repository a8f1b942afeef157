"""Ranks on two GPUs: operators (values, gradients, layers, compiled, captured, tuned), collectives by copy engines, deaths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from crossfade.ops.calls.job import Operator, Shape
from crossfade.ops.choice.cache import Cache
from crossfade.ops.choice.candidate import PLAIN, Candidate, candidates_for
from crossfade.ops.tuning import open_tuner
from crossfade.peers.opening import open_group
from tests.helpers import ops_compile_cases, ops_gradient_cases, ops_modules, ops_prepare_cases
from tests.helpers.device_pair import Peer, run_workers
from tests.helpers.ops_cases import GPU_CASES
from tests.helpers.ops_inputs import EXACT_K, assert_equal, call, check, expected, make, opened
from tests.helpers.peer_gpu_cases import check_a_killed_rank, check_replays, check_right_values, stop
from tests.helpers.ranks import join_gpus, suite
from tests.helpers.tuning_ranks import Products

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


TestOperators = suite(GPU_CASES, 2, "cuda", limit_s=300)
TestFused = suite(CASES, 2, "cuda", limit_s=120)
TestGradients = suite(ops_gradient_cases.CASES, 2, "cuda", limit_s=240)
TestModules = suite(ops_modules.CASES, 2, "cuda", limit_s=240)
TestCompiled = suite(ops_compile_cases.CASES, 2, "cuda", limit_s=540)
TestPrepared = suite(ops_prepare_cases.CASES, 2, "cuda", limit_s=240)

MOST_TFLOPS = 1000.0
"""Of a product in bfloat16: no GPU of today does as many, dense."""


def tuned(peers: dict[int, Peer], rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    join_gpus(rank, num_ranks, f"{folder}/store")
    group = open_group(buffer_bytes=1 << 20)
    cache = Cache("this GPU", num_ranks, "v1", Path(folder) / f"rank{rank}")
    tuner = open_tuner(group, {"matmul_all_reduce": Products("cuda")}, cache=cache, is_measuring=True)
    shape = Shape("matmul_all_reduce", 4096, 4096, 4096, "bfloat16", "nn", num_ranks)
    decision = tuner.tune(shape)
    predicted = tuner.predict(shape, PLAIN)
    # In a capture nothing is measured, and a bucket that nobody has asked about is asked about.
    other, graph, x = (
        Shape("matmul_all_reduce", 512, 4096, 4096, "bfloat16", "nn", num_ranks),
        torch.cuda.CUDAGraph(),
        torch.ones(8).cuda(),
    )
    x.add_(0)  # loads its kernel
    with torch.cuda.graph(graph):
        captured = tuner.decide(other)
        x.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    return {
        "order": [str(each) for each in decision.order],
        "times_us": [time_us for _, time_us in decision.times_us],
        "captured": (str(captured.source), float(x[0])),
        "kept": cache.load(shape) is not None,
        "waves": cache.load_waves(),
        "predicted_us": predicted.total_us if predicted is not None and rank == 0 else None,
        "plain_us": decision.time_us(PLAIN),
        "held": stop(group),
    }


def test_two_gpus_measure_and_agree(tmp_path: Path) -> None:
    first, *others = run_workers([tuned] * 2, [(rank, 2, str(tmp_path)) for rank in range(2)], timeout_s=100.0)
    print("plain, predicted and measured, in us:", first["predicted_us"], first["plain_us"], "waves:", first["waves"])
    for other in others:
        assert (other["order"], other["times_us"], other["captured"]) == (
            first["order"],
            first["times_us"],
            first["captured"],
        )
        assert (other["kept"], other["waves"], other["held"]) == (False, None, [])
    assert first["captured"] == ("model", 2.0)
    assert first["kept"]
    assert first["held"] == []
    assert all(time_us > 0 for time_us in first["times_us"])
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    for k, wave_us in first["waves"]:
        assert 2 * num_sms * 128 * 256 * k / wave_us / 1e6 < MOST_TFLOPS
    assert first["predicted_us"] / 2 < first["plain_us"] < first["predicted_us"] * 2


@pytest.mark.parametrize("candidate", ["rounds(rounds=4)", "rounds(rounds=2)"])
def test_the_survivor_is_told_and_goes_on(tmp_path: Path, candidate: str) -> None:
    check_a_killed_rank(2, str(tmp_path / "store"), 1, is_waiting=False, candidate=candidate)


@pytest.mark.parametrize("is_staged", [False, True])
def test_right_values(tmp_path: Path, is_staged: bool) -> None:
    check_right_values(2, str(tmp_path / "store"), is_staged=is_staged)


@pytest.mark.parametrize("is_staged", [False, True])
def test_replays(tmp_path: Path, is_staged: bool) -> None:
    check_replays(2, str(tmp_path / "store"), is_staged=is_staged)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank(tmp_path: Path, dead: int, is_waiting: bool, is_staged: bool) -> None:
    check_a_killed_rank(2, str(tmp_path / "store"), dead, is_waiting=is_waiting, is_staged=is_staged)
