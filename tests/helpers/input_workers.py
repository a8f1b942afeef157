"""Actors that say where the tensors lie that the driver gave them, on a GPU or with the CPU in its place; values to give them."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crossfade.channels.host_copies import HostCopies

__all__ = ["CPU", "GPU", "Batch", "InputWorker", "OnlyOnce", "Unpicklable", "batch", "gpu", "pinned_slots", "until"]

CPU = "cpu"
GPU = "gpu"


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


def gpu(tensor: torch.Tensor) -> str:
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


def pinned_slots() -> list[str]:
    """Slots of rings that are pinned for this process's devices; the garbage collector knows the object that has them."""
    found = [each for each in gc.get_objects() if type(each) is HostCopies]
    labels = [label for each in found for label in each.home.driver.ledger.held("mapped")]
    return [label for label in labels if "slots of" in label]


class InputWorker:
    """Says what it gets."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._kept: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def where(self, *values: Any) -> Any:
        """Where each of some tensors lies, and its sum."""
        return [(gpu(value), value.sum().item()) for value in values]

    def unpack(self, value: Batch) -> Any:
        """Where its tensors lie, without the empty one, and everything in it as plain data."""
        more = value.more
        first, others = more["pair"]
        tensors = [value.tokens, more["turned"], first, *others, more["alone"], more["wanted"]]
        assert isinstance(more["array"], np.ndarray)
        assert more["wanted"].requires_grad
        assert tuple(more["none"].shape) == (0, 3)
        assert torch.equal(more["turned"], value.tokens.t())
        plain = value.name, value.tokens.tolist(), first.tolist(), [each.tolist() for each in others]
        return [gpu(tensor) for tensor in tensors], (*plain, more["alone"].item(), more["array"].tolist(), more["text"])

    def forward(self, layer: Any) -> Any:
        """Where a module's parameters lie, and what it makes of ones."""
        ones = torch.ones(4, device=layer.weight.device)
        return [gpu(each.data) for each in layer.parameters()], layer(ones).tolist()

    def keep(self, value: Any) -> bool:
        """All that it got until now is as it was, and its own to write to."""
        assert all(torch.equal(one, other) for one, other in self._kept)
        value.add_(1)
        self._kept.append((value, value.clone()))
        return all(torch.equal(one, other) for one, other in self._kept)

    def drop(self) -> None:
        self._kept.clear()

    def pinned_slots(self) -> list[str]:
        return pinned_slots()

    def be_busy_until(self, path: str) -> None:
        """From now on the device that the CPU stands for has something to do until there is such a file."""
        from crossfade.device.host_driver import HostDriver

        HostDriver.is_idle = lambda driver, stream: os.path.exists(path)  # type: ignore[method-assign, assignment]

    def work(self, value: Any, milliseconds: float) -> int:
        """Returns while the GPU still works, on something that has to do with the value."""
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # type: ignore[no-untyped-call]
        value.add_(1)
        return int(value.numel())

    def touch(self, value: Any, path: str) -> int:
        Path(path).touch()
        return len(value)


def until(is_so: Any, limit_s: float = 20.0) -> bool:
    """Whether it comes to be so in time."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
