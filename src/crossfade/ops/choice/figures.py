"""What was measured of a device and its links, as far as products and their collectives depend on it.

Times are in microseconds, rates in GB/s (10^9 bytes a second).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.topology import Link, Topology

if TYPE_CHECKING:
    import torch

TILE_M, TILE_N = 128, 256
"""Of a wave's tiles."""


@dataclass(frozen=True, slots=True)
class Line:
    """A fixed time, and a rate."""

    latency_us: float
    gbs: float

    def __post_init__(self) -> None:
        if not (_is_figure(self.latency_us) and _is_figure(self.gbs) and self.gbs > 0):
            raise ValueError(f"{self} does not exist\nhint: both are finite, and the rate is over 0")

    def time_us(self, size_bytes: float) -> float:
        """For that many bytes."""
        return self.latency_us + size_bytes / (self.gbs * 1e3)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the model reckons with. A collective's line counts the bytes that one rank sends: (W - 1) / W of what it has to
    reduce-scatter or to exchange, W - 1 shares to gather, 2 (W - 1) / W to all-reduce.
    """

    num_sms: int = 132
    waves: tuple[tuple[int, float], ...] = ((2048, 23.8), (4096, 51.0), (7168, 87.0), (8192, 97.0), (16384, 206.0))
    """Time of one wave of tiles of 128 x 256, one on each SM, by K, from the smallest on, with the GPU at its power limit."""
    memory_gbs: float = 2700.0
    """Rate at which a kernel that only adds or copies moves bytes, in and out together."""
    copy: Line = field(default_factory=lambda: Line(6.7, 397.0))
    """A copy engine's copy to a peer."""
    signal_us: float = 7.7
    """From the end of a copy until a stream of the peer continues."""
    stream_write_us: float = 3.3
    """What one write or wait of a word takes on a stream."""
    reduce_scatter: Line = field(default_factory=lambda: Line(20.0, 299.0))
    """The vendor's library, as the next three."""
    all_reduce: Line = field(default_factory=lambda: Line(28.0, 336.0))
    all_gather: Line = field(default_factory=lambda: Line(35.5, 303.0))
    all_to_all: Line = field(default_factory=lambda: Line(29.0, 321.0))
    product_beside_copies: float = 1.04
    """How much longer a product takes while copy engines are busy. This and the next one are factors."""
    copies_beside_product: float = 1.0
    launch_kernel_us: float = 15.0
    """Of the host's time, from Python; as the next two. All are 0 in a captured graph."""
    launch_copy_us: float = 10.0
    launch_wait_us: float = 5.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not _is_figure(value):
                raise ValueError(
                    f"Figures.{item.name} is {value!r}\nhint: measured figures are finite and not negative"
                )
        ks = [k for k, _ in self.waves]
        if not ks or ks[0] < 1 or ks != sorted(set(ks)) or not all(_is_figure(us) and us for _, us in self.waves):
            raise ValueError(f"Figures.waves is {self.waves!r}\nhint: a (k, us) at least, from the smallest k on")
        if self.num_sms < 1 or self.memory_gbs == 0:
            raise ValueError("Figures.num_sms and Figures.memory_gbs are over 0")

    def wave_us(self, k: int) -> float:
        """Time of one wave: between two measured K on the line through them, below the first on the line through the first two
        (a tenth of the first at least), beyond the last in proportion to K.
        """
        at = bisect_left([each for each, _ in self.waves], k)
        if at == len(self.waves):
            last_k, last_us = self.waves[-1]
            return last_us * k / last_k
        if len(self.waves) == 1:
            first_k, first_us = self.waves[0]
            return max(first_us * k / first_k, first_us / 10)
        (k0, us0), (k1, us1) = self.waves[max(at, 1) - 1], self.waves[max(at, 1)]
        return max(us0 + (us1 - us0) * (k - k0) / (k1 - k0), self.waves[0][1] / 10)

    def captured(self) -> Figures:
        """The same for a captured graph, whose operations the host need not launch one by one."""
        return replace(self, launch_kernel_us=0.0, launch_copy_us=0.0, launch_wait_us=0.0)


def _is_figure(value: float) -> bool:
    return math.isfinite(value) and value >= 0


H200 = Figures()
"""Four NVIDIA H200, every two linked by NVLink; CUDA driver 13.0, NCCL 2.28.9."""


def with_topology(figures: Figures, topology: Topology) -> Figures:
    """The same with what ``crossfade topology`` measured in the place of these copies, signals and factors, as far as it did."""
    found: dict[str, Any] = {}
    links = [link for link in topology.links if len(_copies(link)) > 1]
    if links:
        found["copy"] = Line(
            median(_line(link).latency_us for link in links), median(_line(link).gbs for link in links)
        )
    signals = [link.signal_us for link in topology.links if link.signal_us is not None]
    if signals:
        found["signal_us"] = median(signals)
    if topology.devices:
        found["num_sms"] = topology.devices[0].num_sms
    for each in topology.slowdowns:
        if (each.transport, each.work) == ("copy", "gemm"):
            found["copies_beside_product"] = max(1.0, each.communication)
    return replace(figures, **found)


def _copies(link: Link) -> list[tuple[int, float]]:
    return [(rate.size_bytes, rate.duration_us) for rate in link.rates if rate.transport == "copy"]


def _line(link: Link) -> Line:
    """Through the two largest sizes: what an operator moves is large."""
    (size0, us0), (size1, us1) = _copies(link)[-2:]
    if us1 <= us0:
        return Line(0.0, size1 / us1 / 1e3)
    us_per_byte = (us1 - us0) / (size1 - size0)
    return Line(max(0.0, us0 - us_per_byte * size0), 1e-3 / us_per_byte)


KS = (1024, 2048, 4096, 7168, 16384)
NUM_WAVES = 16
WARM_UP_S, NUM_REPEATS = 0.3, 11
"""So long it multiplies before: clocks at the power limit are lower, and that is how a model's products find them."""


def measure_waves(product_us: Callable[[int, int, int], float], num_sms: int) -> tuple[tuple[int, float], ...]:
    """Time of one wave, by K: a share of a product of so many whole waves."""
    m, n = TILE_M * num_sms, TILE_N * NUM_WAVES
    return tuple((k, product_us(m, n, k) / NUM_WAVES) for k in KS)


def product_timer(device: torch.device) -> Callable[[int, int, int], float]:
    """What times torch's product of bfloat16 on a GPU, the median of several in a row; b is the transpose of a row-major matrix."""
    torch = torch_or_raise()

    def product_us(m: int, n: int, k: int) -> float:
        a = torch.randn(m, k, dtype=torch.bfloat16, device=device)
        b = torch.randn(n, k, dtype=torch.bfloat16, device=device).T
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        begin = time.monotonic()
        while time.monotonic() < begin + WARM_UP_S:
            torch.mm(a, b, out=out)
            torch.cuda.synchronize(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            torch.mm(a, b, out=out)
            event.record()
        torch.cuda.synchronize(device)
        times_us: list[float] = [1e3 * begin.elapsed_time(end) for begin, end in pairwise(events)]
        return median(times_us)

    return product_us
