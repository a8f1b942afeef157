"""For which GPU the backend of torch.distributed is opened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

import torch

from crossfade.p2p import backend
from crossfade.p2p.backend import placed


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return monkeypatch


def gpu_of(rank: int, **options: Any) -> int | None:
    index: int | None = torch.device(placed(options, rank).get("device", "cuda")).index
    return index


def test_where_the_program_has_set_no_gpu_it_is_that_of_the_rank(four_gpus: pytest.MonkeyPatch) -> None:
    assert [gpu_of(rank) for rank in (0, 3, 6)] == [0, 3, 2]
    four_gpus.setenv("LOCAL_RANK", "1")
    assert gpu_of(6) == 1
    assert gpu_of(6, device="cuda:2", transport="copy") == 2


def test_the_device_of_the_default_group_comes_first(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("LOCAL_RANK", "1")
    world = SimpleNamespace(bound_device_id=torch.device("cuda:2"))
    four_gpus.setattr(backend, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    assert gpu_of(3) == 2


def test_else_it_is_the_one_that_is_set(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setattr(torch.cuda, "current_device", lambda: 3)
    assert placed({"transport": "copy"}, 1) == {"transport": "copy"}


def test_without_gpus_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert placed({}, 1) == {}
