"""Preprocessing on the CPU, an encoder and a decoder on a GPU each. Needs the extra ``torch``.

::

    python examples/heterogeneous_graph.py [--steps 12]

One actor turns text into windows of bytes and never has a GPU; what it gives is brought to the encoder's GPU on the way
(``device="cuda"``), and the encoder's vectors go from GPU to GPU. The decoder gives its logits to the driver, which has no
GPU, so they arrive on the CPU. Where there are fewer than two GPUs, all actors run on the CPU and the graph is the same.

While the decoder works on one text, the encoder works on the next. Logits equal those of plain calls in this process bit for bit
on the CPU; a GPU's differ from a CPU's by rounding, and the program exits with 1 from 1e-3 on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from byte_model import NUM_BYTES, Block, Embedding, documentation, largest_difference, make_layers, place
from torch import Tensor, nn

import crossfade

SHAPE = (64, 64, 4, 4)  # bytes in a window, width, heads, blocks
NUM_INFLIGHT = 3
LIMIT = 1e-3


class Preprocessor:
    """Text to windows of bytes: lower case, single spaces, the last window filled up with spaces."""

    def prepare(self, text: str) -> Tensor:
        """(B, T) uint8."""
        data = " ".join(text.lower().split()).encode()
        data += b" " * (-len(data) % SHAPE[0])
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, SHAPE[0])


class Encoder:
    """The embedding and half of the blocks."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        layers = make_layers(*SHAPE)[: 1 + SHAPE[-1] // 2]
        assert isinstance(layers[0], Embedding)
        self.layers = nn.Sequential(*layers).to(device)

    @torch.no_grad()
    def encode(self, tokens: Tensor) -> Tensor:
        """(B, T) uint8 -> (B, T, D)."""
        x: Tensor = self.layers(tokens)
        return x


class Decoder:
    """The other blocks and the head."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        layers = make_layers(*SHAPE)[1 + SHAPE[-1] // 2 :]
        assert isinstance(layers[0], Block)
        self.layers = nn.Sequential(*layers).to(device)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V)."""
        y: Tensor = self.layers(x)
        return y


def build(device: str, num_gpus: int) -> Any:
    """Three actors in a row."""
    preprocessor = crossfade.remote(Preprocessor).remote()
    encoder = crossfade.remote(num_gpus=num_gpus)(Encoder).remote(device)
    decoder = crossfade.remote(num_gpus=num_gpus)(Decoder).remote(device)
    with crossfade.InputNode() as text:
        tokens: Any = preprocessor.prepare.bind(text)
        if num_gpus:
            tokens = tokens.with_tensor_transport(device="cuda")
        return decoder.decode.bind(encoder.encode.bind(tokens))


def read_texts(num_texts: int) -> list[str]:
    """Paragraphs of this repository's documentation, over and over."""
    paragraphs = [part for path in documentation() for part in path.read_text(encoding="utf-8").split("\n\n")]
    texts = [part for part in paragraphs if len(part) > SHAPE[0]]
    return [texts[number % len(texts)] for number in range(num_texts)]


def stream(graph: crossfade.CompiledGraph, texts: Sequence[str]) -> list[Tensor]:
    """The logits of all texts, several of them under way at once."""
    refs: deque[Any] = deque()
    results: list[Tensor] = []
    for text in texts:
        if len(refs) == NUM_INFLIGHT:
            results.append(crossfade.get(refs.popleft()))
        refs.append(graph.execute(text))
    return results + [crossfade.get(ref) for ref in refs]


def main(arguments: Sequence[str]) -> int:
    """Runs both, compares every text, and prints; 1 if one differs by more than it may."""
    parser = argparse.ArgumentParser(description="Actors with and without GPUs in one graph.")
    parser.add_argument("--steps", type=int, default=12, help="texts to run")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps is at least 1")
    device, num_gpus = place(2)
    texts = read_texts(options.steps)
    plain = Preprocessor(), Encoder("cpu"), Decoder("cpu")
    expected = [plain[2].decode(plain[1].encode(plain[0].prepare(text))) for text in texts]
    with build(device, num_gpus).compile(max_inflight=NUM_INFLIGHT) as graph:
        stream(graph, texts[:1])
        start_s = time.perf_counter()
        results = stream(graph, texts)
        taken_ms = (time.perf_counter() - start_s) * 1e3
    crossfade.shutdown()
    worst = max(largest_difference(*pair) for pair in zip(expected, results, strict=True))
    num_bytes = sum(result.numel() // NUM_BYTES for result in results)
    print(f"{len(texts)} texts, {num_bytes} bytes: prepared on cpu, encoded and decoded on {device}")
    print(f"{taken_ms / len(texts):.2f} ms a text with {NUM_INFLIGHT} in flight; logits differ by at most {worst:.1e}")
    return 0 if worst <= (LIMIT if num_gpus else 0.0) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
