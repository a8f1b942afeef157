"""Actors that say where the tensors lie that they are given, on GPUs or with the CPU in their place; values to give them."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crossfade.edges.host_copies import HostCopies

__all__ = [
    "CPU",
    "DEVICE",
    "GPU",
    "Batch",
    "InputWorker",
    "OnlyOnce",
    "Unpicklable",
    "batch",
    "plain",
    "until",
    "where",
]

CPU = "cpu"
GPU = "gpu"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where actors with a GPU make tensors."""


@dataclass
class Batch:
    """An object that holds tensors among other things."""

    name: str
    tokens: torch.Tensor
    more: dict[str, Any]


class Unpicklable:
    """What cannot be given to anybody."""

    def __reduce__(self) -> Any:
        raise ValueError("this is not to be pickled")


class OnlyOnce:
    """A thing that is pickled once."""

    num_pickled = 0

    def __reduce__(self) -> Any:
        self.num_pickled += 1
        if self.num_pickled > 1:
            raise ValueError("it was pickled before")
        return str, ("once",)


def batch(size: int, *, device: str = CPU) -> Batch:
    """One whose tensors' lengths and number change with the size."""
    base = torch.arange(size * 6, device=device).view(6, size)
    more = {
        "turned": base.t(),
        "pair": (base[1].to(torch.bfloat16), [torch.ones(3, device=device)] * (size % 3)),
        "none": torch.empty(0, 3, device=device),
        "alone": torch.tensor(7, device=device),
        "wanted": torch.ones(2, device=device, requires_grad=True),
        "array": np.arange(size),
        "text": "x" * size,
    }
    return Batch(f"batch {size}", base, more)


def plain(size: int) -> Any:
    """What `InputWorker.unpack` finds in a batch besides places."""
    value = batch(size)
    first, others = value.more["pair"]
    tokens, rest = value.tokens.tolist(), [other.tolist() for other in others]
    return value.name, tokens, first.tolist(), rest, 7, list(range(size)), value.more["text"]


def where(tensor: torch.Tensor) -> str:
    """Where a tensor lies. In place of a GPU's own memory stands memory of torch's; what stays on the CPU lies on a slot, or where
    that was copied out to, and belongs to somebody else.
    """
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_cuda:
        assert tensor.device.index == torch.cuda.current_device()
        return GPU
    is_torchs = tensor.untyped_storage().resizable()
    return GPU if is_torchs and not torch.cuda.is_available() else CPU


class InputWorker:
    """Says what it gets."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._kept: list[Any] = []
        self._side: Any = None

    def pid(self) -> int:
        return os.getpid()

    def where(self, *values: Any) -> Any:
        """Where each of some tensors lies, and its sum."""
        return [(where(value), value.sum().item()) for value in values]

    def unpack(self, value: Batch) -> Any:
        """Where its tensors lie, without the empty one, and everything in it as plain data."""
        more = value.more
        first, others = more["pair"]
        tensors = [value.tokens, more["turned"], first, *others, more["alone"], more["wanted"]]
        assert isinstance(more["array"], np.ndarray)
        assert more["wanted"].requires_grad
        assert tuple(more["none"].shape) == (0, 3)
        assert torch.equal(more["turned"], value.tokens.t())
        said = value.name, value.tokens.tolist(), first.tolist(), [each.tolist() for each in others]
        rest = more["alone"].item(), more["array"].tolist(), more["text"]
        return [where(tensor) for tensor in tensors], (*said, *rest)

    def forward(self, layer: Any) -> Any:
        """Where a module's parameters lie, and what it makes of ones."""
        ones = torch.ones(4, device=layer.weight.device)
        return [where(each.data) for each in layer.parameters()], layer(ones).tolist()

    def pack(self, size: int, device: str = DEVICE) -> Batch:
        """A batch, on its GPU if nothing else is said."""
        return batch(size, device=device)

    def make(self, number: int, size: int, gpu: int | None = None) -> torch.Tensor:
        """On one of its GPUs, computed after the method has returned."""
        device = torch.device("cuda", gpu) if gpu is not None else torch.device(DEVICE)
        value = torch.full((size,), -1, device=device)
        if DEVICE == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
        return value.fill_(number)

    def is_all(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """Looked at after the method has returned; what is there is spoilt then."""
        if value.is_cuda:
            torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
        found = (value == number).all().reshape(1)
        value.fill_(-2)
        return found

    def is_all_aside(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """The same on a side stream, which rejoins as the guide says."""
        if not value.is_cuda:
            return self.is_all(value, number)
        side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = self.is_all(value, number)
        torch.cuda.current_stream().wait_stream(side)
        return found

    def make_on(self, number: int, size: int, gpus: list[int]) -> list[torch.Tensor]:
        """A tensor on each of several GPUs, with one number more each."""
        return [self.make(number + place, size, gpu) for place, gpu in enumerate(gpus)]

    def look_on(self, values: list[torch.Tensor], number: int) -> Any:
        """On which GPU each lies, and whether it is whole."""
        found = [(value.device.index, bool((value == number + place).all())) for place, value in enumerate(values)]
        for value in values:
            value.fill_(-2)
        return found

    def bring_to(self, value: torch.Tensor, gpu: int) -> Any:
        """A CPU tensor is brought to a GPU by the method itself, which drops it before that has happened."""
        with torch.cuda.device(gpu):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            near = value.to(f"cuda:{gpu}", non_blocking=True)
            return value.is_pinned(), near.sum().reshape(1)

    def bring_aside(self, value: torch.Tensor) -> Any:
        """A CPU tensor is brought to the GPU on a side stream, which rejoins; the method drops it before that has happened."""
        side = self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            total = value.to("cuda", non_blocking=True).sum().reshape(1)
        torch.cuda.current_stream().wait_stream(side)
        return value.is_pinned(), total

    def keep(self, value: Any) -> bool:
        """All that it got until now is as it was, and its own to write to."""
        assert all(torch.equal(one, other) for one, other in self._kept)
        value.add_(1)
        self._kept.append((value, value.clone()))
        return all(torch.equal(one, other) for one, other in self._kept)

    def drop(self) -> None:
        self._kept.clear()

    def pinned_slots(self) -> list[str]:
        """Slots of rings that are pinned for its GPUs; the garbage collector knows the object that has them."""
        found = [each for each in gc.get_objects() if type(each) is HostCopies]
        labels = [label for each in found for label in each.home.driver.ledger.held("mapped")]
        return [label for label in labels if "slots of" in label]

    def be_busy_until(self, path: str) -> None:
        """From now on the device that the CPU stands for has something to do until there is such a file."""
        from crossfade.device.host_driver import HostDriver

        HostDriver.is_idle = lambda driver, stream: os.path.exists(path)  # type: ignore[method-assign, assignment]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def work(self, value: torch.Tensor, seconds: float) -> int:
        """Returns while its GPU still works."""
        torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]
        value.add_(1)
        return value.numel()


def until(is_so: Any, limit_s: float = 20.0) -> bool:
    """Whether it comes to be so in time."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
