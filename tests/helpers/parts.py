"""Parts of a run in a test: calls that take turns, and places where they stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crossfade.batches import yield_point
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.coroutines.parts import Run


def interleave(*calls: Callable[[], Any]) -> list[Any]:
    """What they give, in turns."""
    return Run(ProcessGroups()).go(calls)


class Switching(torch.autograd.Function):
    """The identity; a switch in its forward, where autograd is off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        yield_point()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        yield_point()
        return gradients[0]


switching: Callable[[Tensor], Tensor] = Switching.apply


class Doubling(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Sees operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        yield_point()
        return func(*args, **(kwargs or {}))
