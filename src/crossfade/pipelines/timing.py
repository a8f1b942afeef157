"""What both measurements share: a clock that knows of GPUs, the loss, and a module that is as before afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def now_us(device: torch.device) -> float:
    """Microseconds on a clock, when what was enqueued on the GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() / 1e3


@dataclass(frozen=True)
class Loss:
    """What follows the last stage: the schedule's loss function, where the user gave it."""

    function: Callable[..., torch.Tensor] | None = None
    target: Any = None

    def roots(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What the backward pass begins with: the loss, or, without one, the outputs."""
        if self.function is None:
            return outputs
        return (self.function(outputs[0] if len(outputs) == 1 else outputs, self.target),)


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensor, or the tensors of a tuple or list; of anything else there are none."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(each for each in value if isinstance(each, torch.Tensor)) if isinstance(value, tuple | list) else ()


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards gradients, buffers and the random numbers' states are what they were; inside, there are no gradients at first."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
