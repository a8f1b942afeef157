"""What the ranks of a GPU group do in the tests of the tuner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from crossfade.ops.cache import Cache
from crossfade.ops.candidate import PLAIN
from crossfade.ops.shape import Shape
from crossfade.ops.tuners import open_tuner
from crossfade.peers.group import open_group
from tests.helpers.device_pair import Peer, run_workers
from tests.helpers.peer_gpu_cases import start, stop
from tests.helpers.tuning_ranks import Products

MOST_TFLOPS = 1000.0
"""Of a product in bfloat16: no GPU of today does as many, dense."""


def tuned(peers: dict[int, Peer], rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    start(rank, num_ranks, f"{folder}/store")
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


def check_tuned(num_ranks: int, folder: str) -> None:
    args = [(rank, num_ranks, folder) for rank in range(num_ranks)]
    first, *others = run_workers([tuned] * num_ranks, args, timeout_s=100.0)
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
