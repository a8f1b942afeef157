"""A byte-level transformer whose layers are split over actors (tensor parallel). Needs the extra ``torch``.

::

    python examples/tensor_parallel_inference.py [--steps 8] [--ranks 2]

Every rank has H / R of the heads and 4 D / R of the inner columns: the first product of each layer is split by columns, the
second by rows, so that each rank has a summand of the layer's output, and one all-reduce gives all ranks the sum. Embedding,
norms and head are on every rank. Ranks are actors with a GPU each where there are enough, else on the CPU.

The sum is added up in another order than in the unsplit model, so logits agree as nearly as float32 lets them (about 1e-6 of
their size), not bit for bit; the program exits with 1 where they differ by more than 1e-3.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from byte_model import Block, attend, documentation, largest_difference, make_layers, place, read_batches
from torch import Tensor, nn
from torch.nn import functional

import crossfade
from crossfade import collective

WINDOW, WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 64, 4, 3
SHAPE = (WINDOW, WIDTH, NUM_HEADS, NUM_BLOCKS)
BATCH = 4
LIMIT = 1e-3


def columns(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    """A part of the outputs."""
    part = nn.Linear(linear.in_features, len(rows))
    part.load_state_dict({"weight": linear.weight[rows], "bias": linear.bias[rows]})
    return part


def rows(linear: nn.Linear, columns: Tensor, *, has_bias: bool) -> nn.Linear:
    """A summand of the output: the part that follows from some of the inputs. One rank adds the bias."""
    part = nn.Linear(len(columns), linear.out_features, bias=has_bias)
    part.load_state_dict({"weight": linear.weight[:, columns]} | ({"bias": linear.bias} if has_bias else {}))
    return part


class Rank:
    """Part r of R of every block."""

    def __init__(self, device: str, rank: int, num_ranks: int) -> None:
        torch.set_num_threads(1)
        self.device, self.num_heads = device, NUM_HEADS // num_ranks
        embedding, *blocks, head = make_layers(*SHAPE)
        self.embedding, self.head = embedding.to(device), head.to(device)
        self.parts = [self.cut(block, rank, num_ranks).to(device) for block in blocks if isinstance(block, Block)]

    def cut(self, block: Block, rank: int, num_ranks: int) -> nn.ModuleDict:
        """This rank's part of a block."""
        own = torch.arange(WIDTH).chunk(num_ranks)[rank]  # channels: whole heads
        inner = torch.arange(4 * WIDTH).chunk(num_ranks)[rank]
        return nn.ModuleDict(
            {
                "norm_1": block.norm_1,
                "qkv": columns(block.qkv, torch.cat([own, own + WIDTH, own + 2 * WIDTH])),
                "out": rows(block.out, own, has_bias=rank == 0),
                "norm_2": block.norm_2,
                "up": columns(block.up, inner),
                "down": rows(block.down, inner, has_bias=rank == 0),
            }
        )

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) bytes -> (B, T, D)."""
        x: Tensor = self.embedding(tokens.to(self.device))
        return x

    @torch.no_grad()
    def attention(self, index: int, x: Tensor) -> Tensor:
        """This rank's heads: a summand of what block ``index`` adds to x first."""
        part = self.parts[index]
        y: Tensor = part["out"](attend(part["qkv"](part["norm_1"](x)), self.num_heads))
        return y

    @torch.no_grad()
    def network(self, index: int, x: Tensor) -> Tensor:
        """This rank's inner columns: a summand of what block ``index`` adds to x second."""
        part = self.parts[index]
        y: Tensor = part["down"](functional.gelu(part["up"](part["norm_2"](x))))
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V)."""
        y: Tensor = self.head(x)
        return y


def build(ranks: Sequence[Any]) -> Any:
    """The whole model: in each block two all-reduces between the ranks. Each rank gives all logits."""
    with crossfade.InputNode() as tokens:
        xs = [rank.embed.bind(tokens) for rank in ranks]
        for index in range(NUM_BLOCKS):
            for name in ("attention", "network"):
                summands = [getattr(rank, name).bind(index, x) for rank, x in zip(ranks, xs, strict=True)]
                sums = collective.allreduce.bind(summands)
                xs = [rank.add.bind(x, y) for rank, x, y in zip(ranks, xs, sums, strict=True)]
        return crossfade.MultiOutputNode([rank.logits.bind(x) for rank, x in zip(ranks, xs, strict=True)])


def main(arguments: Sequence[str]) -> int:
    """Runs both, compares every batch, and prints; 1 if a batch differs."""
    parser = argparse.ArgumentParser(description="A small transformer split over actors inside its layers.")
    parser.add_argument("--steps", type=int, default=8, help="batches to run")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="actors")
    options = parser.parse_args(arguments)
    device, num_gpus = place(options.ranks)
    batches = [batch[:, :-1] for batch in read_batches(documentation(), WINDOW, BATCH, options.steps)]
    whole = nn.Sequential(*make_layers(*SHAPE))
    with torch.no_grad():
        expected = [whole(batch) for batch in batches]
    rank_class = crossfade.remote(num_gpus=num_gpus)(Rank)
    ranks = [rank_class.remote(device, rank, options.ranks) for rank in range(options.ranks)]
    with build(ranks).compile() as graph:
        crossfade.get(graph.execute(batches[0]))  # the first execution opens connections
        start_s = time.perf_counter()
        results = [crossfade.get(graph.execute(batch)) for batch in batches]
        taken_ms = (time.perf_counter() - start_s) * 1e3
    crossfade.shutdown()
    worst = max(
        largest_difference(wanted, of_rank) for wanted, each in zip(expected, results, strict=True) for of_rank in each
    )
    print(f"{options.ranks} ranks on {device}, {2 * NUM_BLOCKS} all-reduces a batch of {BATCH} x {WINDOW} bytes")
    print(f"{len(batches)} batches, {taken_ms / len(batches):.2f} ms each; logits differ by at most {worst:.1e}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
