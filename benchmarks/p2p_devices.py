"""Clocks and loads of `benchmarks.p2p_transfers`, by events of a GPU or, so that every line can be tried, on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

__all__ = ["Beside", "Block", "Machine", "OnCpu", "OnGpu", "all_reduces", "products", "vit"]

MB = 1 << 20
GATE_CYCLES = 120_000_000
"""How long a GPU is kept busy while hosts enqueue what is measured: some 60 ms."""


class Beside(NamedTuple):
    """Milliseconds from a common beginning to the end of either."""

    transfers_ms: float
    load_ms: float


class Machine(Protocol):
    """Where tensors lie, and how time is taken there."""

    device: torch.device

    def synchronize(self) -> None:
        """Waits for everything that was enqueued."""

    def ahead_ms(self, act: Callable[[], object], align: Callable[[], object]) -> float:
        """The device's time for what ``act`` enqueues, all of it before the device begins."""

    def load_ms(self, load: Callable[[], object]) -> float:
        """The time of a load alone."""

    def beside(self, act: Callable[[], object], load: Callable[[], object], align: Callable[[], object]) -> Beside:
        """Both at the same time."""


class OnGpu:
    """One GPU; a load has a stream of its own."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def ahead_ms(self, act: Callable[[], object], align: Callable[[], object]) -> float:
        first, last = _event(), _event()
        _gate()
        align()
        first.record()
        act()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    def load_ms(self, load: Callable[[], object]) -> float:
        first, last = _event(), _event()
        with torch.cuda.stream(self._stream):
            first.record()
            load()
            last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    def beside(self, act: Callable[[], object], load: Callable[[], object], align: Callable[[], object]) -> Beside:
        first, moved, worked = _event(), _event(), _event()
        _gate()
        align()
        first.record()
        self._stream.wait_event(first)
        with torch.cuda.stream(self._stream):
            load()
            worked.record()
        act()
        moved.record()
        torch.cuda.synchronize()
        return Beside(float(first.elapsed_time(moved)), float(first.elapsed_time(worked)))


class OnCpu:
    """The host's memory; a load is done by a thread."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._thread = ThreadPoolExecutor(1)

    def synchronize(self) -> None: ...

    def ahead_ms(self, act: Callable[[], object], align: Callable[[], object]) -> float:
        align()
        begin_s = time.monotonic()
        act()
        return (time.monotonic() - begin_s) * 1e3

    def load_ms(self, load: Callable[[], object]) -> float:
        begin_s = time.monotonic()
        self._thread.submit(load).result()
        return (time.monotonic() - begin_s) * 1e3

    def beside(self, act: Callable[[], object], load: Callable[[], object], align: Callable[[], object]) -> Beside:
        def loaded_s() -> float:
            load()
            return time.monotonic()

        align()
        begin_s = time.monotonic()
        worked = self._thread.submit(loaded_s)
        act()
        moved_s = time.monotonic()
        return Beside((moved_s - begin_s) * 1e3, (worked.result() - begin_s) * 1e3)


def _gate() -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(GATE_CYCLES)  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# Loads


def products(device: torch.device) -> Callable[[], object]:
    """Ten matrix products, 8192^3 in bf16 on a GPU."""
    is_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if is_gpu else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)

    def load() -> None:
        for _ in range(10):
            torch.mm(a, b, out=c)

    return load


def all_reduces(device: torch.device) -> Callable[[], object]:
    """Four all-reduces of another group: of 64 MB on a GPU."""
    group: Any = dist.new_group(backend="gloo" if device.type == "cpu" or not _has_nccl() else "nccl")
    tensor = torch.randn((64 if device.type == "cuda" else 1) * MB // 4, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

    def load() -> None:
        for _ in range(4):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

    return load


def _has_nccl() -> bool:
    """Whether each rank has a GPU of its own, which NCCL wants."""
    return torch.cuda.device_count() >= dist.get_world_size()


def vit(device: torch.device, batch: int, num_passes: int = 2) -> Callable[[], object]:
    """Forward passes of a transformer of ViT-g's size, with random weights, in bf16; a small one on the CPU."""
    is_gpu = device.type == "cuda"
    width, depth, heads, hidden = (1408, 40, 16, 6144) if is_gpu else (32, 2, 4, 64)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    model = nn.Sequential(*(Block(width, heads, hidden) for _ in range(depth))).to(device, dtype)
    x = torch.randn(batch, 257, width, device=device, dtype=dtype)

    @torch.no_grad()
    def load() -> None:
        for _ in range(num_passes):
            model(x)

    return load


class Block(nn.Module):
    """(batch, tokens, width) -> the same: attention, then two linear layers, each on normalised input and added to it."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self._qkv = nn.Linear(width, 3 * width)
        self._out = nn.Linear(width, width)
        self._mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self._qkv(self._norms[0](x)).view(batch, tokens, 3, self._num_heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self._out(mixed)
        return x + torch.as_tensor(self._mlp(self._norms[1](x)))
