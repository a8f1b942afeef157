"""Actors that make small tensors for collectives, and what these must give, by plain torch."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from crossfade.collective import ReduceOp

NUM_ACTORS = 3


def make(rank: int, seed: int, shape: Sequence[int], dtype: str) -> Any:
    """A tensor of small numbers that follows from rank and seed; products of three fit into int8."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    low = 0 if dtype == "uint8" else -4
    return torch.randint(low, 5, tuple(shape), generator=generator).to(getattr(torch, dtype))


class Maker:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kept: Any = None

    def make(self, seed: int, shape: Sequence[int], dtype: str) -> Any:
        return make(self.rank, seed, shape, dtype)

    def keep(self, seed: int) -> Any:
        """A tensor that this actor keeps too."""
        self.kept = make(self.rank, seed, (1000,), "float32")
        return self.kept

    def is_kept_as_it_was(self, seed: int, _: Any) -> bool:
        """Whether nobody has changed what is kept."""
        return bool(torch.equal(self.kept, make(self.rank, seed, (1000,), "float32")))

    def fail_for(self, seed: int, bad: int) -> Any:
        if seed == bad:
            raise KeyError(f"seed {seed} on {self.rank}")
        return make(self.rank, seed, (4,), "float32")

    def transposed(self, seed: int) -> Any:
        """A matrix whose rows are not in one piece, and which wants gradients."""
        return (torch.arange(6.0).reshape(2, 3) + seed).t().requires_grad_()

    def with_nan(self, seed: int, dtype: str) -> Any:
        """Ones, and a NaN in one place of each rank but the first."""
        made = torch.ones(6, dtype=getattr(torch, dtype))
        made[self.rank : self.rank + self.rank // max(self.rank, 1)] = float("nan")
        return made

    def of_length(self, seed: int) -> Any:
        """A tensor whose length differs between the ranks for odd seeds."""
        return torch.ones(4 + self.rank * (seed % 2))

    def whatever(self, value: Any) -> Any:
        return value

    def spoil(self, value: Any) -> None:
        """Changes what it is given, which nobody may."""
        value.zero_()

    def add(self, first: Any, second: Any) -> Any:
        """The sum of two tensors, of whatever shape."""
        return first.reshape(-1)[:4] + second.reshape(-1)[:4]

    def work(self, num_steps: int) -> int:
        return sum(1 for _ in range(num_steps))

    def sleep(self, time_s: float) -> Any:
        time.sleep(time_s)
        return torch.ones(4)


def expected_reduction(tensors: Sequence[Any], op: ReduceOp) -> Any:
    """By plain torch, in a dtype wide enough to be exact."""
    wide = [each.to(torch.float64 if each.is_floating_point() else torch.int64) for each in tensors]
    functions: dict[ReduceOp, Callable[[Any, Any], Any]] = {
        ReduceOp.PRODUCT: operator.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }
    result = reduce(functions.get(op, operator.add), wide)
    return (result / len(wide) if op is ReduceOp.AVG else result).to(tensors[0].dtype)


def all_makes(seed: int, shape: Sequence[int], dtype: str) -> list[Any]:
    return [make(rank, seed, shape, dtype) for rank in range(NUM_ACTORS)]


def same(found: Any, wanted: Any) -> bool:
    close = torch.allclose if wanted.is_floating_point() else torch.equal
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bool(close(found, wanted))
