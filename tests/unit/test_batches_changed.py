"""What a module changes in place is found when its calls are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

import torch
from torch import Tensor, nn

from crossfade.batches.capture.calls import CapturedCall, CapturedStep
from crossfade.errors import BatchesError
from tests.helpers.batches_captured import record


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, *, argument: Tensor | None = None) -> Tensor:
        counted: Any = self.count if argument is None else argument
        counted.add_(1)
        return x * self.scale


@pytest.mark.parametrize("kind", [CapturedCall, CapturedStep])
@pytest.mark.parametrize("argument", [False, True])
def test_a_module_that_counts_is_refused(kind: Any, *, argument: bool) -> None:
    model = Counting()
    with pytest.raises(BatchesError, match="changes an argument" if argument else "changes a buffer"):
        kind(model, model, (torch.ones(6),), {"argument": torch.zeros(())} if argument else {}, record)


def test_a_module_that_counts_has_what_it_had_before_a_capture_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    before = {name: each.clone() for name, each in model.named_buffers()}
    with pytest.raises(BatchesError, match="changes a buffer in place"):
        CapturedStep(model, model, (torch.randn(5, 6),), {}, record)
    for name, each in model.named_buffers():
        assert torch.equal(each, before[name]), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_argument", [False, True])
def test_what_is_changed_in_place_is_seen_though_a_capture_runs_nothing(
    mode: Callable[[], Any], *, is_argument: bool
) -> None:
    model: Any = nn.Identity()
    model.register_buffer("seen", torch.zeros(1))

    def call(x: Tensor) -> Tensor:
        (x if is_argument else model.seen).add_(1)
        return x * 2

    def record_only(work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        before = model.seen.clone()
        result = work()
        model.seen.data.copy_(before)
        return (lambda: None), result

    what = "an argument" if is_argument else "a buffer"
    with mode(), pytest.raises(BatchesError, match=f"changes {what} in place"):
        CapturedCall(model, call, (torch.ones(2),), {}, record_only)
