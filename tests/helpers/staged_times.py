"""How long a value takes through the host's memory, chunk by chunk, by the arithmetic of `crossfade.device.staged_layout`."""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_us(lengths: Sequence[int], gbs: float = 55.0, copy_us: float = 3.5) -> float:
    """When the last of these chunks is down, counted from the start of the first, without the way of the signals."""
    up = down = 0.0
    for length in lengths:
        up += length / (gbs * 1e3) + copy_us
        down = max(up, down) + length / (gbs * 1e3) + copy_us
    return down
