"""What `benchmarks.hop_latency` measures and what each figure has to be: data, no code that runs anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MB = 1 << 20


@dataclass(frozen=True)
class Measure:
    """One question, asked of both libraries in alternating blocks.

    Attributes:
        key: a short name.
        title: the row's title in the report.
        request: what a worker is asked (see `benchmarks.hop_worker.MEASURES`).
        num: samples in one block.
        num_quick: the same for a smoke run.
        ray_share: the part of ``num`` that Ray's block takes, where it is much slower.
        limit_us: the median must be at most this.
        p99_limit_us: and the 99th percentile at most this.
        ray_factor: and Ray must take at least this many times as long.
        copy_factor: and it must be at most this many memcpys of the same size in the same block.
    """

    key: str
    title: str
    request: Mapping[str, Any]
    num: int
    num_quick: int
    ray_share: float = 1.0
    limit_us: float | None = None
    p99_limit_us: float | None = None
    ray_factor: float | None = None
    copy_factor: float | None = None


def _hops(shape: str, num_actors: int, **more: Any) -> dict[str, Any]:
    return {"measure": "hops", "shape": shape, "num_actors": num_actors, **more}


def _one_way(kind: str) -> dict[str, Any]:
    return {"measure": "one_way", "kind": kind, "num_bytes": 64 * MB}


MEASURES = (
    Measure(
        "hot", "1 byte out and back, hot", _hops("chain", 1), 4_000, 300, limit_us=7, p99_limit_us=50, ray_factor=6
    ),
    Measure("paused", "the same after a pause of 10 ms", _hops("chain", 1, pause_s=0.01), 150, 20),
    Measure("chain2", "chain of 2 actors", _hops("chain", 2), 2_000, 200, limit_us=20),
    Measure("chain4", "chain of 4 actors", _hops("chain", 4), 1_000, 100, limit_us=45),
    Measure("fan2", "one input to 2 actors", _hops("fan", 2), 2_000, 200, limit_us=20),
    Measure("fan4", "one input to 4 actors", _hops("fan", 4), 1_000, 100, limit_us=40),
    Measure(
        "echo",
        "1 MB numpy array out and back",
        {"measure": "array_round_trips", "num_bytes": MB, "check_every": 20},
        300,
        20,
        limit_us=120,
        ray_factor=3,
    ),
    Measure(
        "echo read",
        "the same, all of it read by the driver in between",
        {"measure": "array_round_trips", "num_bytes": MB, "check_every": 1},
        300,
        20,
    ),
    Measure("numpy", "64 MB numpy array, one way", _one_way("numpy"), 20, 5, copy_factor=1.3),
    Measure("torch", "64 MB torch CPU tensor, one way", _one_way("torch"), 20, 5, ray_share=0.25, copy_factor=1.3),
    Measure(
        "inflight",
        "8 in flight, per execution",
        {"measure": "throughput", "num_inflight": 8},
        50_000,
        2_000,
        ray_share=0.1,
        limit_us=1e6 / 150_000,
    ),
)


def _allreduce(key: str, title: str, num: int, num_quick: int, **request: int) -> Measure:
    return Measure(key, title, {"measure": "allreduces", **request}, num, num_quick)


COLLECTIVES = (
    _allreduce("allreduce2", "allreduce of 1 KB of 2 actors", 1_000, 50, num_actors=2, count=1, num_bytes=1024),
    _allreduce("allreduce3", "allreduce of 1 KB of 3 actors", 500, 50, num_actors=3, count=1, num_bytes=1024),
    _allreduce("bucket", "allreduce of 20 times 1 KB of 2 actors", 500, 50, num_actors=2, count=20, num_bytes=1024),
    _allreduce("allreduce large", "allreduce of 16 MB of 2 actors", 20, 5, num_actors=2, count=1, num_bytes=16 * MB),
)
"""Of CPU tensors, by gloo; crossfade only."""

ASYNCIO = Measure("asyncio", "1 byte out and back, awaited", {"measure": "awaits"}, 2_000, 200)
"""In an event loop; crossfade only."""

BLOCKING = Measure("blocking", "1 byte out and back, no spinning", _hops("chain", 1), 2_000, 200)
BLOCKING_FUTEX_FACTOR = 1.5

START_UP = {"measure": "start_up", "num_actors": 4}
START_UP_LIMIT_US = 1.5e6
IMPORT_LIMIT_US = 0.2e6

IDLE = {"measure": "idle", "num_actors": 4}
IDLE_LIMIT_PERCENT = 0.3
IDLE_AFTER_S = 1.0
IDLE_WINDOW_S = 5.0
