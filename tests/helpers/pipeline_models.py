"""Three models to cut into stages, of any size: a transformer with tied embeddings, a ResNet, an encoder-decoder with skips."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return x + out


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + down


class Transformer(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, words]; the last product's matrix is that of the embedding."""

    def __init__(self, num_words: int, width: int, num_layers: int, num_heads: int = 2, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        self.register_buffer("positions", torch.arange(length))
        self.position = nn.Embedding(length, width)
        layers = [layer for _ in range(num_layers) for layer in (Attention(width, num_heads), Mlp(width))]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(self.get_buffer("positions"))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ResidualBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU(inplace=True)
        is_same = num_in == num_out and stride == 1
        self.short = nn.Identity() if is_same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += self.short(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """Images [batch, 3, height, width] -> logits [batch, 10]."""

    def __init__(self, num_channels: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_channels, 3, 1, 1)
        body: list[nn.Module] = []
        before = num_channels
        for level, num_blocks in enumerate(blocks):
            after = num_channels * 2**level
            for number in range(num_blocks):
                body.append(ResidualBlock(before, after, 2 if level and not number else 1))
                before = after
        self.body = nn.ModuleList(body)
        self.head = nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.body:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class EncoderDecoder(nn.Module):
    """Images [batch, 3, height, width] and a scale [batch, 1, 1, 1] -> images, and features [batch, channels] of the
    narrowest place.

    Each encoder level's result goes to the decoder level of its size, and the input to the last product.
    """

    def __init__(self, num_channels: int, num_levels: int) -> None:
        super().__init__()
        widths = [num_channels * 2**level for level in range(num_levels)]
        self.stem = nn.Conv2d(3, num_channels, 3, 1, 1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(list(pairwise(widths))))
        self.merge = nn.ModuleList(nn.Conv2d(2 * a, a, 3, 1, 1) for a in reversed(widths[:-1]))
        self.head = nn.Conv2d(num_channels, 3, 1)

    def forward(self, images: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.stem(images))
        skips = []
        for down in self.down:
            skips.append(x)
            x = torch.tanh(down(x))
        features = x.mean((2, 3))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = torch.tanh(merge(torch.cat([up(x), skips.pop()], 1)))
        return self.head(x) + images * scale, features


class Frozen(nn.Module):
    """Tokens [batch, length] -> logits [batch, 5]; the first half needs no gradients, and the tokens are used again at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.head = nn.Linear(width, 5)
        for module in (self.embedding, *self.layers[:3]):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        is_word = (tokens > 0).unsqueeze(-1)
        logits: Tensor = self.head((x * is_word).mean(1))
        return logits
