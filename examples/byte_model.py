"""What the examples share: a byte-level transformer, text to run it on, and where it runs. Needs the extra ``torch``.

Letters: B windows in a batch, T bytes in a window, D width of the model, H heads, V = 256 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_BYTES = 256
SEED = 2026
ROOT = Path(__file__).resolve().parent.parent


class Embedding(nn.Module):
    """Bytes and their positions to vectors: (B, T) uint8 -> (B, T, D) float32."""

    def __init__(self, window: int, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(window, width)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.byte(tokens.long()) + self.position.weight[: tokens.shape[1]]
        return vectors


class Block(nn.Module):
    """Causal attention and a two-layer network, each added to what came in: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.norm_1(x)), self.num_heads))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return y


def attend(qkv: Tensor, num_heads: int) -> Tensor:
    """Causal attention of any number of heads: queries, keys and values (B, T, 3 D) -> (B, T, D)."""
    num_windows, length, width = qkv.shape
    heads = qkv.view(num_windows, length, 3, num_heads, width // 3 // num_heads)
    q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).reshape(num_windows, length, width // 3)


def make_layers(window: int, width: int, num_heads: int, num_blocks: int) -> list[nn.Module]:
    """All layers of the model, the same in every process."""
    torch.manual_seed(SEED)
    blocks = [Block(width, num_heads) for _ in range(num_blocks)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES))
    return [Embedding(window, width), *blocks, head]


def read_batches(files: Sequence[Path], window: int, batch_size: int, num_batches: int) -> list[Tensor]:
    """Batches of (B, T + 1) bytes: the last column is only predicted. What does not fill a batch is left out.

    Raises:
        ValueError: the files do not fill one batch.
        OSError: a file cannot be read.
    """
    text = b"\n".join(path.read_bytes() for path in files)
    num_windows = max(0, (len(text) - 1) // window)
    num_batches = min(num_batches, num_windows // batch_size)
    if num_batches == 0:
        needed = batch_size * window + 1
        raise ValueError(
            f"the files have {len(text)} bytes and a batch takes {needed}\nhint: give more text or a smaller --batch"
        )
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, window + 1, window)
    return list(torch.split(windows[: num_batches * batch_size].contiguous(), batch_size))


def documentation() -> list[Path]:
    """Text that is always there: this repository's own."""
    return [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def place(num_actors: int) -> tuple[str, int]:
    """Where so many actors run: ``("cuda", 1)`` with a GPU for each where there are enough, else ``("cpu", 0)``.

    An actor that books a GPU has it as its current device, so plain ``"cuda"`` is the right one in each.
    """
    return ("cuda", 1) if torch.cuda.device_count() >= num_actors else ("cpu", 0)


def add_up_in_order() -> None:
    """From now on attention's backward on a GPU adds up in the same order every time; the fastest one does not."""
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Of any two elements in the same place."""
    return float((left - right).abs().max())
