"""The demo's actors on GPUs. Their processes import torch."""

from __future__ import annotations

import torch

from crossfade.cli.actors import Echo
from crossfade.cli.fan_in import Parts

SIZE = 8192
PERIOD = 251
MOST_SENDERS = 3


class TensorSender:
    """Makes a square tensor of whole numbers, which half precision holds exactly, for each execution."""

    def __init__(self, number: int, size: int, device: str) -> None:
        places = torch.arange(size, device=device)
        self._base = ((places[:, None] + 3 * places + number) % PERIOD).half()

    def make(self, execution: int) -> torch.Tensor:
        """float16[size, size], another one for each execution."""
        return self._base + execution


class TensorReceiver(Echo):
    """Multiplies what it gets with a matrix that puts the last column first, so that the product is exact."""

    def __init__(self, size: int, device: str) -> None:
        self._weights = torch.eye(size, device=device).half().flip(0)

    def work(self, tensor: torch.Tensor) -> int:
        """The sum of the product's first column."""
        return int((tensor @ self._weights)[:, 0].sum(dtype=torch.int64).item())


def expected(number: int, execution: int, size: int = SIZE) -> int:
    """The sum of the last column of what sender ``number`` makes."""
    return sum((row + 3 * (size - 1) + number) % PERIOD + execution for row in range(size))


def on_gpus(num_gpus: int) -> Parts:
    """The program for so many GPUs: one for the receiver, the others for senders."""
    return Parts(
        sender=TensorSender,
        receiver=TensorReceiver,
        sender_args=(SIZE, "cuda"),
        receiver_args=(SIZE, "cuda"),
        num_senders=min(MOST_SENDERS, num_gpus - 1),
        num_gpus=1,
        value_bytes=2 * SIZE * SIZE,
        expected=expected,
        overlap_transport="auto",
    )
