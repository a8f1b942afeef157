"""Models of `benchmarks.batches`: stacks of layers as tensor and expert parallelism have them, with plain torch.distributed calls.

A stack's ``steps`` is its forward as a generator that yields each collective as a function of (communicator): the ways by hand run
it, one half after the other. ``forward`` runs the same generator and does each collective where it stands; it is what an unmodified
module does, and what crossfade is given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Collective: TypeAlias = tuple[str, Tensor, Tensor]
"""``all_reduce`` or ``all_to_all``, what is read, what is written."""
Steps: TypeAlias = Generator[Collective, None, Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the report.

    Attributes:
        name: of the row.
        make: the stack, given the number of ranks and a device.
        shape: of the input, [sequences, tokens of each, width].
        trains: a forward and a backward, not a forward alone.
        captured: all sides are CUDA graphs.
        is_random: made by `random_cases`: few rounds, and no sides by hand.
    """

    name: str
    make: Callable[[int, str], Stack]
    shape: tuple[int, int, int]
    trains: bool = False
    captured: bool = False
    is_random: bool = False


class _Reduce(torch.autograd.Function):
    """The sum over ranks forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Spread(torch.autograd.Function):
    """Nothing forward, the sum over ranks backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient


reduced: Callable[[Tensor], Tensor] = _Reduce.apply
spread: Callable[[Tensor], Tensor] = _Spread.apply


class Stack(nn.Module):
    """Layers one behind the other, each with a residual."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def steps(self, x: Tensor) -> Steps:
        layer: Any
        for layer in self.layers:
            x = yield from layer.steps(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        layer: Any
        if torch.is_grad_enabled():
            for layer in self.layers:
                x = layer.train_step(x)
            return x
        steps = self.steps(x)
        try:
            while True:
                name, source, out = next(steps)
                if name == "all_reduce":
                    dist.all_reduce(source)
                else:
                    dist.all_to_all_single(out, source)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Layer(nn.Module):
    """What a stack is made of."""

    def steps(self, x: Tensor) -> Steps:
        raise NotImplementedError

    def train_step(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def _linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(rows, columns, bias=False)


class Transformer(Layer):
    """Attention and a gated MLP, heads and inner columns split over the ranks: two all-reduces of [tokens, width]."""

    def __init__(self, width: int, inner: int, num_ranks: int, head: int = 128) -> None:
        super().__init__()
        self.head = head
        self.num_heads = width // head // num_ranks
        own = self.num_heads * head
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = _linear(width, 3 * own), _linear(own, width)
        self.up, self.down = _linear(width, 2 * inner // num_ranks), _linear(inner // num_ranks, width)

    def heads(self, x: Tensor) -> Tensor:
        """What attention gives to its last product."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, self.head).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, -1)

    def gated(self, x: Tensor) -> Tensor:
        """What the MLP gives to its last product."""
        gate, value = self.up(x).chunk(2, dim=-1)
        return F.silu(gate) * value  # type: ignore[no-any-return]

    def halves(self) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor], nn.Linear]]:
        """Attention and MLP: the norm before, what is done then, and the product whose sum over the ranks is added."""
        yield self.norms[0], self.heads, self.out
        yield self.norms[1], self.gated, self.down

    def steps(self, x: Tensor) -> Steps:
        for norm, half, last in self.halves():
            own = last(half(norm(x)))
            yield "all_reduce", own, own
            x = x + own
        return x

    def train_step(self, x: Tensor) -> Tensor:
        for norm, half, last in self.halves():
            x = x + reduced(last(half(spread(norm(x)))))
        return x


class Experts(Layer):
    """A mixture of experts, spread over the ranks: two all-to-alls of ``top`` rows a token. Routing is even, so shapes are static.

    The experts of a token come from its place, their weights from a router.
    """

    def __init__(self, width: int, inner: int, num_experts: int, top: int, num_ranks: int) -> None:
        super().__init__()
        self.top, self.num_experts, self.num_ranks = top, num_experts, num_ranks
        own = num_experts // num_ranks
        self.norm, self.router = nn.RMSNorm(width), _linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(own, width, 2 * inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(own, inner, width) * inner**-0.5)

    def routing(self, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The experts of each token, [tokens, top], and the rows (token * top + choice) in the experts' order."""
        places = torch.arange(num_tokens * self.top, device=device, dtype=torch.int32)
        experts = (places * 5 + places // self.num_experts) % self.num_experts
        return experts.view(num_tokens, self.top).long(), experts.to(torch.int16).argsort(stable=True)

    def work(self, came: Tensor) -> Tensor:
        """What this rank's experts make of the rows that each rank sent, without moving any."""
        rows = came.view(self.num_ranks, self.num_experts // self.num_ranks, -1, came.shape[-1])
        done = torch.empty_like(rows)
        for of_rank, out in zip(rows, done, strict=True):
            gate, value = torch.bmm(of_rank, self.up).chunk(2, dim=-1)
            torch.bmm(F.silu(gate).mul_(value), self.down, out=out)
        return done.view(came.shape)

    def steps(self, x: Tensor) -> Steps:
        tokens = self.norm(x).flatten(0, 1)
        experts, order = self.routing(len(tokens), x.device)
        weights = self.router(tokens).gather(1, experts).softmax(-1)
        sent = tokens[order // self.top]
        came = torch.empty_like(sent)
        yield "all_to_all", sent, came
        back = self.work(came)
        home = torch.empty_like(back)
        yield "all_to_all", back, home
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        mixed = F.embedding_bag(place.view(-1, self.top), home, per_sample_weights=weights, mode="sum")
        return x + mixed.view(x.shape)


def transformer(layers: int, width: int, inner: int, head: int = 128) -> Callable[[int, str], Stack]:
    def make(num_ranks: int, device: str) -> Stack:
        return _stack(device, layers, lambda: Transformer(width, inner, num_ranks, head))

    return make


def experts(layers: int, width: int, inner: int, num_experts: int, top: int) -> Callable[[int, str], Stack]:
    def make(num_ranks: int, device: str) -> Stack:
        return _stack(device, layers, lambda: Experts(width, inner, num_experts, top, num_ranks))

    return make


def _stack(device: str, layers: int, make: Callable[[], Layer]) -> Stack:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return Stack([make() for _ in range(layers)]).to(dtype)


CASES = [
    Case("prefill, 2048 wide, 16k tokens", transformer(12, 2048, 8192), (8, 2048, 2048)),
    Case("prefill, 2048 wide, 8k tokens, captured", transformer(12, 2048, 8192), (8, 1024, 2048), captured=True),
    Case("prefill, 4096 wide, 16k tokens", transformer(8, 4096, 14336), (16, 1024, 4096)),
    Case("experts, 128 of which 8, 2048 wide", experts(8, 2048, 768, 128, 8), (8, 1024, 2048)),
    Case("training, 2048 wide, 16k tokens", transformer(8, 2048, 8192), (8, 2048, 2048), trains=True),
    Case("training, 4096 wide, 8k tokens", transformer(6, 4096, 14336), (8, 1024, 4096), trains=True),
    Case("experts, 64 of which 4, 4096 wide", experts(6, 4096, 1536, 64, 4), (8, 1024, 4096)),
    Case("prefill, 2048 wide, 16k tokens, captured", transformer(12, 2048, 8192), (8, 2048, 2048), captured=True),
    Case("prefill, 4096 wide, 16k tokens, captured", transformer(8, 4096, 14336), (16, 1024, 4096), captured=True),
    Case("experts, 128 of which 8, 2048 wide, captured", experts(8, 2048, 768, 128, 8), (8, 1024, 2048), captured=True),
    # for four GPUs
    Case("prefill, 5120 wide, 16k tokens of 4096", transformer(8, 5120, 27648), (4, 4096, 5120)),
    Case("prefill, 5120 wide, 8k tokens of 2048", transformer(8, 5120, 27648), (4, 2048, 5120)),
    Case("prefill, 5120 wide, 8k tokens of 4096", transformer(8, 5120, 27648), (2, 4096, 5120)),
]
QUICK = [
    Case("prefill, quick", transformer(3, 64, 128, 16), (8, 32, 64)),
    Case("experts, quick", experts(2, 64, 32, 8, 2), (8, 16, 64)),
    Case("training, quick", transformer(2, 64, 128, 16), (8, 32, 64), trains=True),
]
"""For a trial on a CPU."""


def random_cases(device: str, number: int = 100) -> list[Case]:
    """Random models and shapes, each of 1 to 100 milliseconds a step on a GPU; the same ones each time."""
    on_gpu, cases = device == "cuda", list[Case]()
    for index in range(number):
        draw = random.Random(index)
        trains, captured = draw.random() < 0.25, on_gpu and draw.random() < 0.5
        layers, width = draw.randint(1, 6), draw.choice([1024, 2048, 4096] if on_gpu else [32, 64])
        shape = draw.choice([2, 4, 8, 16]), draw.choice([32, 1024, 2048, 4096] if on_gpu else [8, 16]), width
        # Routing goes by a token's place: halves have the whole's where it has come round again.
        tokens = shape[0] * shape[1] // 2
        known = [(16, 2), (64, 4), (128, 8)] if on_gpu else [(8, 2)]
        even = [each for each in known if tokens * each[1] % each[0] ** 2 == 0]
        if trains or not even or draw.random() < 0.6:
            inner = width * draw.choice([1, 2, 4])
            kind, make = f"{inner} inside", transformer(layers, width, inner, 128 if on_gpu else 16)
        else:
            num, top = draw.choice(even)
            kind, make = f"{num} experts of which {top}", experts(layers, width, width // 2, num, top)
        size = f"{layers} layers {width} wide {kind}, {shape[0]} x {shape[1]} tokens"
        modes = [name for name, is_so in (("training", trains), ("captured", captured)) if is_so]
        cases.append(Case(", ".join([f"{index}: {size}", *modes]), make, shape, trains, captured, is_random=True))
    return cases
