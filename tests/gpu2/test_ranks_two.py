"""Ranks on two GPUs: operators (values, gradients, layers, compiled, captured, tuned), collectives by copy engines, deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from crossfade.ops.cache import Cache
from crossfade.ops.candidate import PLAIN
from crossfade.ops.shape import Shape
from crossfade.ops.tuners import open_tuner
from crossfade.peers.group import open_group
from tests.helpers import ops_compile_cases, ops_fused_cases, ops_gradient_cases, ops_modules, ops_prepare_cases
from tests.helpers.device_pair import Peer, run_workers
from tests.helpers.ops_cases import GPU_CASES
from tests.helpers.peer_gpu_cases import check_a_killed_rank, check_replays, check_right_values, stop
from tests.helpers.ranks import join_gpus, suite
from tests.helpers.tuning_ranks import Products

TestOperators = suite(GPU_CASES, 2, "cuda", limit_s=300)
TestFused = suite(ops_fused_cases.CASES, 2, "cuda", limit_s=120)
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
        captured = tuner.tune(other, is_capturing=True)
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


@pytest.mark.timeout(120)
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("candidate", ["rounds(rounds=4)", "rounds(rounds=2)"])
def test_the_survivor_is_told_and_goes_on(tmp_path: Path, candidate: str) -> None:
    check_a_killed_rank(2, str(tmp_path / "store"), 1, is_waiting=False, candidate=candidate)


def test_right_values(tmp_path: Path) -> None:
    check_right_values(2, str(tmp_path / "store"))


def test_replays(tmp_path: Path) -> None:
    check_replays(2, str(tmp_path / "store"))


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank(tmp_path: Path, dead: int, is_waiting: bool) -> None:
    check_a_killed_rank(2, str(tmp_path / "store"), dead, is_waiting=is_waiting)
