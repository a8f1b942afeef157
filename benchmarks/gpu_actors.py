"""The actors of the GPU benchmarks, for crossfade and for Ray alike, with the bare measures taken in the same processes.

Values are random, times a power of two that changes with the execution: so each result is exactly a power of two times that of
another execution, and a value of the wrong execution shows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_arrivals import reads_us

NUM_FACTORS, NUM_INPUTS = 4, 3
GATE_CYCLES = 400_000  # 0.2 ms, in which the host enqueues ahead
WARM_UP_S = 1.0
DTYPES = {"cuda": torch.float16, "cpu": torch.float32}


def host_us() -> float:
    """How long this process's core takes for 300 calls of a little Python: the median of some.

    On machines that are shared, a core whose other half works for somebody else is half as fast, for seconds.
    """
    written: list[int] = [0] * 8

    def step(number: int) -> None:
        written[number & 7] = number

    def steps_us() -> float:
        start_ns = time.perf_counter_ns()
        for number in range(300):
            step(number)
        return (time.perf_counter_ns() - start_ns) / 1e3

    return statistics.median(steps_us() for _ in range(15))


def gpus_for(device: str, num_actors: int) -> float:
    """What each actor books; two share a GPU where there are too few."""
    if device != "cuda":
        return 0
    return 1 if torch.cuda.device_count() >= num_actors else 0.5


def factor(execution: int) -> float:
    return float(2 ** (execution % NUM_FACTORS))


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def device_us(device: str, act: Callable[[], Any]) -> float:
    """What ``act`` enqueues, on the device's clock, the host's time left out; on the CPU the host's clock."""
    if device != "cuda":
        start_ns = time.perf_counter_ns()
        act()
        return (time.perf_counter_ns() - start_ns) / 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(GATE_CYCLES)  # type: ignore[no-untyped-call]
    first.record()
    act()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last) * 1e3)


def warm_up(act: Callable[[], Any], finish: Callable[[], Any] = lambda: None) -> None:
    """A second of the load that is going to be measured: GPUs that reach their power limit slow down."""
    end = time.monotonic() + WARM_UP_S
    while time.monotonic() < end:
        act()
        finish()


def current_device(device: str) -> int:
    return torch.cuda.current_device() if device == "cuda" else -1


def copy_us(device: str, source: torch.Tensor, target_device: int, num: int) -> list[float]:
    """Bare copies, one at a time: by the copy engine into another GPU's memory, with nothing of any library around them."""
    taken = _copies_us(device, source, f"cuda:{target_device}" if device == "cuda" else "cpu", num)
    if device == "cuda":
        torch.cuda.empty_cache()
    return taken


def _copies_us(device: str, source: torch.Tensor, target_device: str, num: int) -> list[float]:
    target = torch.empty_like(source, device=target_device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    taken = [device_us(device, copy) for _ in range(num + 3)][3:]
    if not torch.equal(target.to(source.device), source):
        raise RuntimeError("the bare copy did not copy")
    return taken


class Sender:
    """Makes a square tensor for each execution.

    Args:
        device: ``cuda`` or ``cpu``.
        number: tells senders apart.
        size: rows and columns.
    """

    def __init__(self, device: str, number: int, size: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(number)
        self._device = device
        self._base = torch.randn(size, size, device=device).to(DTYPES[device])

    def make(self, execution: int) -> torch.Tensor:
        return self._base * factor(execution)

    def reference(self) -> tuple[int, float]:
        """The column of the largest element of the first row of the product with itself, and that element in float64."""
        row = self._base[0].double()
        product = torch.cat([row @ part.double() for part in torch.split(self._base, 1000, dim=1)])
        column = int(product.abs().argmax())
        return column, float(product[column])

    def device(self) -> int:
        return current_device(self._device)

    def bare_us(self, target_device: int, num: int) -> tuple[list[float], list[float]]:
        """Making a tensor alone, and one transfer alone."""
        made = [device_us(self._device, lambda: self._base * 2.0) for _ in range(num + 3)][3:]
        return made, copy_us(self._device, self._base, target_device, num)


class Receiver:
    """Multiplies what it gets with itself, and reads one element."""

    def __init__(self, device: str, size: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(99)
        self._device = device
        bases = [torch.randn(size, size, device=device).to(DTYPES[device]) for _ in range(NUM_INPUTS)]
        self._inputs = [base * factor(number) for number in range(NUM_FACTORS) for base in bases]

    def multiply(self, tensor: torch.Tensor, column: int) -> float:
        return float(torch.matmul(tensor, tensor)[0, column].item())

    def device(self) -> int:
        return current_device(self._device)

    def host_us(self) -> float:
        return host_us()

    def products_us(self, num: int, in_a_row: bool) -> list[float]:
        """Three products, ``num`` times: each three by themselves, or the time per three while all follow each other.

        Of the same numbers as those that come from senders: how fast a GPU at its power limit is depends on them.
        """

        def three(number: int) -> None:
            first = NUM_INPUTS * (number % NUM_FACTORS)
            for tensor in self._inputs[first : first + NUM_INPUTS]:
                torch.matmul(tensor, tensor)

        def all_of_them() -> None:
            for number in range(num):
                three(number)

        if in_a_row:
            if self._device == "cuda":
                warm_up(all_of_them, lambda: synchronise(self._device))
            return [device_us(self._device, all_of_them) / num]

        def each() -> list[float]:
            return [device_us(self._device, partial(three, number)) for number in range(num)]

        if self._device == "cuda":
            warm_up(each)
        return each()

    def reads_us(self, num: int, others: Sequence[int]) -> float:
        """Three products with one element read after each, as `gpu_arrivals.reads_us` has it, behind a second of the same.

        Args:
            num: executions.
            others: the GPUs that the tensors come from meanwhile; none: they are there already.
        """
        inputs = [self._inputs[number::NUM_INPUTS] for number in range(NUM_INPUTS)]
        if self._device == "cuda":
            warm_up(lambda: reads_us(inputs, others, NUM_FACTORS))
        taken_us = reads_us(inputs, others, num)
        if self._device == "cuda":
            torch.cuda.empty_cache()
        return taken_us


def bank(device: str, size_bytes: int) -> list[torch.Tensor]:
    """Random tensors of so many bytes, the same in every process on one kind of device."""
    torch.manual_seed(size_bytes)
    num = size_bytes // 2
    return [torch.randn(num, device=device).half() for _ in range(NUM_FACTORS)]


class Source:
    """Gives tensors that are there already, so that nothing but moving them takes time."""

    def __init__(self, device: str, size_bytes: int) -> None:
        torch.set_num_threads(1)
        self._device = device
        self._bank = bank(device, size_bytes)
        synchronise(device)

    def give(self, execution: int) -> torch.Tensor:
        return self._bank[execution % NUM_FACTORS]

    def host_us(self) -> float:
        return host_us()

    def last_elements(self) -> list[float]:
        return [float(tensor[-1].item()) for tensor in self._bank]

    def bare_us(self, target_device: int, num: int) -> list[float]:
        return copy_us(self._device, self._bank[0], target_device, num)


class Sink:
    """Looks at tensors."""

    def __init__(self, device: str, size_bytes: int) -> None:
        torch.set_num_threads(1)
        self._device = device
        self._size_bytes = size_bytes

    def host_us(self) -> float:
        return host_us()

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def last(self, tensor: torch.Tensor) -> float:
        return float(tensor[-1].item())

    def is_whole(self, tensor: torch.Tensor, execution: int) -> bool:
        """Every element, against the same numbers made here."""
        return torch.equal(tensor, bank(self._device, self._size_bytes)[execution % NUM_FACTORS])

    def device(self) -> int:
        return current_device(self._device)
