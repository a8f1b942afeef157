"""What both measurements share: clocks that know of GPUs, the loss, and a module that is as before afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crossfade.pipelines.torch_names import delay


def now_us(device: torch.device) -> float:
    """Microseconds on a clock, when what was enqueued on the GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() / 1e3


_CYCLES_PER_US = 2000
"""Of the clock of an H100 or H200 at its fastest."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """How long something keeps its host and its GPU busy, in microseconds."""

    host_us: float = 0.0
    """Of the host: all of it on CPUs; what enqueuing takes where a GPU computes."""
    device_us: float = 0.0
    """Of the GPU, when it does not wait for the host; 0 on CPUs."""


class Stopwatch:
    """Times one piece of work after another; each begins when the GPU is idle.

    A piece is timed on the host or on the GPU. For the GPU's time, a kernel that only takes time keeps the GPU busy until the host
    has enqueued the whole piece. The host's time is taken without that kernel: a piece that asks for a result would wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_us = 0.0
        self._begun: Any = None

    def start(self, behind_us: float = 0.0) -> None:
        """Begins a piece. ``behind_us``: how long the GPU is kept busy first, to be timed itself; 0 times the host."""
        self._start_us, self._begun = now_us(self._device), None
        if behind_us and self._device.type == "cuda":
            delay(self._device, int(behind_us * _CYCLES_PER_US))
            self._begun = self._mark()

    def stop(self) -> PassTime:
        """Ends the piece, and returns the host's time, or the GPU's."""
        if self._begun is None:
            return PassTime(host_us=time.perf_counter_ns() / 1e3 - self._start_us)
        ended = self._mark()
        torch.cuda.synchronize(self._device)
        return PassTime(device_us=self._begun.elapsed_time(ended) * 1e3)

    def _mark(self) -> Any:
        cuda: Any = torch.cuda  # whose events have no types
        mark = cuda.Event(enable_timing=True)
        mark.record(cuda.current_stream(self._device))
        return mark


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
