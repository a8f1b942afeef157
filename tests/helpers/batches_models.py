"""Random models whose collectives a batch may be interleaved at, in double precision; and what tests compare."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
NEAR = 1e-11
"""Two orders of summation in float64."""


class Sum(torch.autograd.Function):
    """The sum over ranks, forward; and of gradients, backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


class Gather(torch.autograd.Function):
    """All ranks' columns, and this rank's sum of gradients for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts).mean(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


class Exchange(torch.autograd.Function):
    """Halves of the columns change places between ranks, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _exchanged(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _exchanged(gradients[0])


def _exchanged(x: Tensor) -> Tensor:
    columns = x.t().contiguous()
    out = torch.empty_like(columns)
    dist.all_to_all_single(out, columns)
    return out.t()


all_sum: Callable[[Tensor], Tensor] = Sum.apply
all_mean: Callable[[Tensor], Tensor] = Gather.apply
exchange: Callable[[Tensor], Tensor] = Exchange.apply


def functional_sum(x: Tensor) -> Tensor:
    world: Any = dist.group.WORLD
    total: Tensor = funcol.all_reduce(x.detach(), "sum", world) + x - x.detach()
    return total


def asynchronous_sum(x: Tensor) -> Tensor:
    """Two collectives in flight, waited for by the model itself."""
    one, other = x.detach().clone(), x.detach() * 2
    works = [dist.all_reduce(each, async_op=True) for each in (one, other)]
    between = x * 1.5
    for work in works:
        work.wait()
    return between + one + other


def nothing(x: Tensor) -> Tensor:
    return x


STEPS: list[Callable[[Tensor], Tensor]] = [
    all_sum,
    all_mean,
    exchange,
    functional_sum,
    asynchronous_sum,
    nothing,
]


class Block(nn.Module):
    """A linear layer, a collective, and a residual; perhaps in a checkpoint."""

    def __init__(self, step: Callable[[Tensor], Tensor], checkpointed: bool, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.step, self.checkpointed, self.residual = step, checkpointed, residual

    def _inside(self, x: Tensor) -> Tensor:
        return self.step(torch.tanh(self.linear(x)))

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self._inside, x, use_reentrant=False) if self.checkpointed else self._inside(x)
        assert isinstance(out, Tensor)
        return out + x if self.residual else out


def random_model(number: int) -> nn.Module:
    """A model that all ranks make alike, but for its weights."""
    draw = random.Random(number)
    blocks = [Block(draw.choice(STEPS), draw.random() < 0.25, draw.random() < 0.5) for _ in range(draw.randint(1, 6))]
    torch.manual_seed(100 * number + dist.get_rank())
    for block in blocks:
        block.linear.reset_parameters()
    return nn.Sequential(*blocks)


def same_input(rows: int = 6, seed: int = 5) -> Tensor:
    """Equal on all ranks."""
    return torch.randn(rows, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module) -> list[Tensor]:
    """Clones of all gradients, which are then cleared."""
    found = []
    for each in module.parameters():
        gradient = each.grad if each.grad is not None else torch.zeros_like(each)
        full: Any = gradient
        found.append((full.full_tensor() if hasattr(full, "full_tensor") else full).detach().clone())
        each.grad = None
    return found


def train(call: Callable[..., Any], module: nn.Module, *args: Any) -> tuple[Tensor, list[Tensor]]:
    """The output of a call, and the gradients of its mean square."""
    output = call(*args)
    output.square().mean().backward()
    return output.detach().clone(), gradients(module)


def assert_near(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]], limit: float = NEAR) -> None:
    """Outputs and all gradients are equal, but for the order of summation."""
    pairs = [(ours[0], theirs[0]), *zip(ours[1], theirs[1], strict=True)]
    for number, (one, other) in enumerate((one.detach(), other.detach()) for one, other in pairs):
        assert one.shape == other.shape
        scale = max(1.0, float(other.abs().max()))
        difference = float((one - other).abs().max()) / scale
        assert difference < limit, f"{'the output' if not number else f'gradient {number - 1}'} differs by {difference}"
