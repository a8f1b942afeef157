"""Shared memory of GPUs that one rank cannot allocate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the memory is torch's")
pytest.importorskip("triton", reason="kernels of a group are Triton's")

import torch

from crossfade.errors import DeviceError
from crossfade.peers import cuda_memory

NO_GROUP: Any = None


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_fail_where_one_does(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 sees it; else the other ranks would wait for the one that raised."""

    def empty(*_: Any, **__: Any) -> torch.Tensor:
        if failing == 0:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(1)

    def gather(group: Any, device: Any, own: list[int]) -> list[list[int]]:
        assert own == [failing != 0]
        return [own, [failing != 1]]

    monkeypatch.setattr(cuda_memory, "_symmetric", lambda: SimpleNamespace(empty=empty))
    monkeypatch.setattr(cuda_memory, "gather", gather)
    with pytest.raises(DeviceError, match=f"rank {failing} could not allocate 64 MB") as raised:
        cuda_memory._allocate(NO_GROUP, 0, 64 << 20)
    assert (raised.value.__cause__ is None) == (failing != 0)


def test_what_all_ranks_could_allocate_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.empty(1)
    monkeypatch.setattr(cuda_memory, "_symmetric", lambda: SimpleNamespace(empty=lambda *_, **__: made))
    monkeypatch.setattr(cuda_memory, "gather", lambda group, device, own: [own, own])
    assert cuda_memory._allocate(NO_GROUP, 0, 1) is made
