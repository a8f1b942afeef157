"""Operands of the kernel of `matmul_signaled`, and the host in the place of its streams.

Operands are small integers, so every accumulator is exact in float32 and every expected bit is known.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from crossfade.device.borrowed import device_of
from crossfade.device.driver import HOST
from crossfade.ops.signaled.tiles import TileConfig

SMALL = TileConfig(16, 32, 16, num_warps=4, num_stages=2)
"""Tiles that the interpreter does quickly."""


class Words:
    """The part of a driver that is used here: waits are over at once, or they are mistakes."""

    def name_range(self, address: int, size_bytes: int, label: str) -> None:
        """Nothing."""

    def wait_value(self, stream: int, address: int, value: int) -> None:
        found = ctypes.c_uint32.from_address(address).value
        assert found == value, f"a stream waits for {value} and finds {found}"

    def wait_and_reset(self, stream: int, address: int, value: int, reset: int) -> None:
        self.wait_value(stream, address, value)
        ctypes.c_uint32.from_address(address).value = reset


def integers(rows: int, columns: int, kind: str, seed: int, most: int = 3) -> Any:
    """Small integers, laid out by rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, (rows, columns), generator=generator).to(getattr(torch, kind))


def by_columns(tensor: Any) -> Any:
    """The same values, laid out by columns."""
    return tensor.T.contiguous().T


def spaced(tensor: Any, more: int) -> Any:
    """The same values with room between rows, filled with NaN."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + more), float("nan"), dtype=tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def rounded(total: Any, kind: str) -> Any:
    """As float32 is rounded where it lies: by the interpreter, bfloat16 is cut off."""
    if kind == "bfloat16" and not total.is_cuda:
        return (total.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return total.to(getattr(torch, kind))


def poisoned(rows: int, columns: int, kind: str, device: int = HOST) -> Any:
    """What nobody may read, and everybody must have overwritten."""
    return torch.full((rows, columns), float("nan"), dtype=getattr(torch, kind), device=device_of(device))
