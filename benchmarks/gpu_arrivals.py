"""What the receiver of the overlap program does, in plain torch: products, reads, and what comes from elsewhere beneath them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

NUM_SLOTS = 2


class Arrival:
    """A tensor that comes from another GPU for each execution, by the copy engine, as far ahead as there are slots.

    Args:
        tensors: what comes, in turn, on the device that it comes to; of one shape.
        other: the number of the GPU that it comes from; -1 for the CPU, where it comes at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], other: int) -> None:
        self._is_gpu = other >= 0
        self._sources = [tensor.to(f"cuda:{other}") if self._is_gpu else tensor for tensor in tensors]
        self._slots = [torch.empty_like(tensors[0]) for _ in range(NUM_SLOTS)]
        if self._is_gpu:
            self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._there = [torch.cuda.Event() for _ in range(NUM_SLOTS)]  # type: ignore[no-untyped-call]
            self._is_free = [torch.cuda.Event() for _ in range(NUM_SLOTS)]  # type: ignore[no-untyped-call]

    def begin(self, execution: int) -> None:
        """Enqueues the transfer, behind the last use of its slot."""
        slot, source = execution % NUM_SLOTS, self._sources[execution % len(self._sources)]
        if not self._is_gpu:
            self._slots[slot].copy_(source)
            return
        self._stream.wait_event(self._is_free[slot])
        with torch.cuda.stream(self._stream):
            self._slots[slot].copy_(source, non_blocking=True)
        self._there[slot].record(self._stream)

    def take(self, execution: int) -> torch.Tensor:
        """What came, for the current stream."""
        slot = execution % NUM_SLOTS
        if self._is_gpu:
            torch.cuda.current_stream().wait_event(self._there[slot])
        return self._slots[slot]

    def give_back(self, execution: int) -> None:
        """The current stream has used it."""
        if self._is_gpu:
            self._is_free[execution % NUM_SLOTS].record()


def reads_us(inputs: Sequence[Sequence[torch.Tensor]], others: Sequence[int], num: int) -> float:
    """A product of each tensor with itself and one element read, per execution of all, while executions follow each other.

    Args:
        inputs: for each product the tensors that executions take in turn, (size, size) each.
        others: for each product the GPU that its tensor comes from meanwhile, as `Arrival` takes it; none: it is there already.
        num: executions.

    Raises:
        RuntimeError: an element is not the one that the same product gave alone.
    """
    wanted = [[torch.matmul(tensor, tensor)[0, 0].item() for tensor in tensors] for tensors in inputs]
    arrivals = [Arrival(*pair) for pair in zip(inputs, others, strict=True)] if others else []
    for arrival in arrivals:
        arrival.begin(0)
    start_ns = 0
    for execution in range(num + NUM_SLOTS):
        if execution == NUM_SLOTS:
            start_ns = time.perf_counter_ns()
        for arrival in arrivals:
            arrival.begin(execution + 1)
        for place, tensors in enumerate(inputs):
            turn = execution % len(tensors)
            taken = arrivals[place].take(execution) if arrivals else tensors[turn]
            got = torch.matmul(taken, taken)[0, 0].item()
            if arrivals:
                arrivals[place].give_back(execution)
            if got != wanted[place][turn]:
                raise RuntimeError(f"product {place} of execution {execution} has {got}, not {wanted[place][turn]}")
    return (time.perf_counter_ns() - start_ns) / 1e3 / num
