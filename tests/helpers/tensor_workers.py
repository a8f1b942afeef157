"""An actor for random graphs whose values are tensors, on the CPU or on a GPU, with the same bits on either.

All arithmetic is in integers that wrap, or in half precision on integers that it holds exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.workers import Worker, digest, make

MOST_EXACT = 2048  # integers up to here are exact in half precision


def leaves(value: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors in a value, and everything else in it, in order."""
    if isinstance(value, torch.Tensor):
        return [value], []
    if isinstance(value, dict):
        value = [item for key in sorted(value) for item in (key, value[key])]
    if not isinstance(value, list | tuple):
        return [], [value]
    tensors, others = [], []
    for item in value:
        more_tensors, more_others = leaves(item)
        tensors += more_tensors
        others += more_others
    return tensors, others


class TensorWorker(Worker):
    """As its base, with tensors on ``cuda``, which is the current GPU, or ``cpu``."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.set_num_threads(1)
        self._device = device

    def mix(self, key: str, kind: str, size_bytes: int, *values: Any, **named: Any) -> Any:
        """A tensor made of all tensors that came in, without reading one of them: the host may be far ahead of the device."""
        self._calls[key] += 1
        tensors, others = leaves([values, named])
        seed = digest((self._calls[key], others))
        places = torch.arange(max(1, size_bytes // 8), device=self._device)
        mixed = places * (2 * seed + 1) + seed
        for tensor in tensors:
            words = tensor.to(self._device).reshape(-1).to(torch.int64)
            if words.numel():
                mixed = mixed * 31 + words[places % words.numel()]
        return {"mixed": mixed, "parts": [mixed[: len(mixed) // 2], seed]} if kind == "tensors" else mixed

    def _make(self, kind: str, size_bytes: int, seed: int) -> Any:
        if kind not in ("tensor", "half", "turned", "tensors"):
            return make(kind, size_bytes, seed)
        whole = torch.arange(size_bytes // 8, device=self._device) * (2 * seed + 1) + seed
        half = (whole % MOST_EXACT).half()
        match kind:
            case "tensor":
                return whole
            case "half":
                return half
            case "turned":
                return whole[: len(whole) // 2 * 2].view(2, -1).t()
        return {"on": whole, "both": [half, (whole[:3].cpu(), str(seed))], "again": whole}
