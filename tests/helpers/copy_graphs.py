"""Actors that pass tensors on, and graphs of them over channels between devices; without GPUs, CPU tensors stand for theirs."""

from __future__ import annotations

import os
from typing import Any

import torch

import crossfade

torch.set_num_threads(1)


class Worker:
    """Makes tensors and says what it gets."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._kept: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def make(self, size: int) -> Any:
        return torch.arange(size)

    def fail_if_odd(self, size: int) -> Any:
        if size % 2:
            raise KeyError(size)
        return torch.arange(size)

    def double(self, value: Any) -> Any:
        return value * 2

    def total(self, *values: Any) -> int:
        return int(sum(value.sum() for value in values))

    def describe(self, value: Any) -> Any:
        return value["name"], value["tensor"].tolist(), value["list"][0].dtype is torch.bfloat16, value["list"][1]

    def pack(self, size: int) -> Any:
        return {"name": "x" * size, "tensor": torch.arange(size), "list": [torch.ones(3, dtype=torch.bfloat16), None]}

    def keep(self, value: Any) -> Any:
        """All that it got until now is as it was."""
        self._kept.append((value, value.clone()))
        return all(torch.equal(one, other) for one, other in self._kept)

    def drop(self) -> int:
        self._kept.clear()
        return os.getpid()


class NcclWorker(Worker):
    """Has gloo in NCCL's place."""

    def __init__(self) -> None:
        from crossfade.edges import nccl_link
        from tests.helpers.nccl_pair import StandIn

        super().__init__()
        nccl_link.nccl_group = StandIn


def chain(actors: list[Any], transport: str, **options: Any) -> Any:
    first, second, third = actors
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        doubled = second.double.bind(made).with_tensor_transport(transport)
        return crossfade.MultiOutputNode([third.total.bind(doubled, made), second.total.bind(made)]).compile(**options)


def run(graph: crossfade.CompiledGraph, size: int) -> Any:
    return crossfade.get(graph.execute(size), timeout=30)


def expected(size: int) -> list[int]:
    return [3 * (size * (size - 1) // 2), size * (size - 1) // 2]
