"""How long a wave of tiles takes: measured once on a device by products of whole waves, for the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.model import TILE_M, TILE_N

if TYPE_CHECKING:
    import torch

__all__ = ["measure_waves", "product_timer"]

KS = (1024, 2048, 4096, 7168, 16384)
NUM_WAVES = 16
WARM_UP_S, NUM_REPEATS = 0.3, 11
"""So long it multiplies before: clocks at the power limit are lower, and that is how a model's products find them."""


def measure_waves(product_us: Callable[[int, int, int], float], num_sms: int) -> tuple[tuple[int, float], ...]:
    """Time of one wave, by K: a share of a product of so many whole waves.

    Args:
        product_us: time of the product of (M, K) by (K, N), of its M, N and K.
        num_sms: of the device.
    """
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
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPEATS + 1)]
        moments[0].record()
        for moment in moments[1:]:
            torch.mm(a, b, out=out)
            moment.record()
        torch.cuda.synchronize(device)
        times_us: list[float] = [1e3 * begin.elapsed_time(end) for begin, end in pairwise(moments)]
        return median(times_us)

    return product_us
