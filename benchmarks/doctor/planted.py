"""What a planted program is, and what all of them are made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.doctor.models import ConvNet, Transformer

__all__ = ["Planted", "Sizes", "Step", "convnet", "train", "transformer"]

Step = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """What a seed chooses. ``is_small``: all is small enough for a CPU."""

    width: int
    num_layers: int
    batch: int
    length: int
    device: torch.device
    dtype: torch.dtype
    is_small: bool

    @classmethod
    def of(cls, seed: int, device: torch.device, *, is_small: bool = False) -> Sizes:
        chosen = random.Random(seed)
        if is_small:
            return cls(64, 2, 2, 16, device, torch.float32, True)
        width, batch = chosen.choice([(1536, 24), (2048, 16), (1024, 48), (1536, 10), (2048, 8), (1024, 20)])
        num_layers = chosen.choice([4, 5, 6])
        return cls(width, num_layers, batch, 1024, device, torch.bfloat16, False)


@dataclass(frozen=True)
class Planted:
    """A program.

    Attributes:
        name: what it is called.
        cause: what a doctor should say first, as `crossfade.profile.doctor.view.Cause` names it; empty for a healthy one.
        num_ranks: how many ranks it needs at least.
        make: gives the step with the cause (True) or without it.
    """

    name: str
    cause: str
    num_ranks: int
    make: Callable[[Sizes, bool], Step]


def train(model: nn.Module, x: torch.Tensor, before: Callable[[], torch.Tensor] | None = None) -> Step:
    """A training step on ``x``, or on what ``before`` gives."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        value = x if before is None else before()
        optimizer.zero_grad()
        model(value).square().mean().backward()
        optimizer.step()

    return step


def transformer(sizes: Sizes) -> tuple[Transformer, torch.Tensor]:
    """The network and its input."""
    with sizes.device:
        model = Transformer(sizes.width, sizes.num_layers).to(sizes.dtype)
    return model, torch.randn(sizes.batch, sizes.length, sizes.width, device=sizes.device, dtype=sizes.dtype)


def convnet(sizes: Sizes) -> tuple[ConvNet, torch.Tensor]:
    """The network and its input, four images for each element of the batch."""
    side = 16 if sizes.is_small else 128
    with sizes.device:
        model = ConvNet(sizes.width // 8, sizes.num_layers)
    return model, torch.randn(sizes.batch * 4, 3, side, side, device=sizes.device)
