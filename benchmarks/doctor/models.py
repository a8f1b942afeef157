"""What causes are planted in: a small transformer, a convolution network, and a chain of products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "ConvNet", "Transformer"]


class Block(nn.Module):
    """One layer of a transformer. Tensors are (batch, length, width)."""

    def __init__(self, width: int, num_heads: int = 8) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + y


class Transformer(nn.Module):
    """Layers of `Block`; ``between`` is called with each layer's output and number, and gives the next one's input."""

    def __init__(self, width: int, num_layers: int, num_heads: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.between: Callable[[torch.Tensor, int], torch.Tensor] = lambda x, _: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.between(layer(x), number)
        return x


class ConvNet(nn.Module):
    """A residual convolution network. Takes images (batch, 3, side, side), gives (batch, 100)."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(num_blocks)
        )
        self.wide = nn.Linear(width * 16, 2048)
        self.head = nn.Linear(2048, 100)
        self.unused: nn.Module = nn.Linear(8, 8)
        self.between: Callable[[torch.Tensor, int], torch.Tensor] = lambda x, _: x

    def without_unused(self) -> None:
        """All parameters that are left are used."""
        self.unused = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = self.between(functional.relu(x + block(x)), number)
        x = functional.adaptive_avg_pool2d(x, 4).flatten(1)
        y: torch.Tensor = self.head(functional.relu(self.wide(x)))
        return y
