"""Captured parts on the CPU, with a recorder in place of CUDA graphs: it repeats the operators that ran, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from crossfade.batches import interleave
from crossfade.batches.calibration import Moves, Way
from crossfade.batches.captured import CapturedStep
from crossfade.batches.tuner import Step
from tests.helpers.batches_models import assert_near, random_model, same_input, train
from tests.helpers.batches_wrappers import GROUPS


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators, their inputs and their outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                if func.namespace == "_c10d_functional":
                    again = pytree.tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, again)
                for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old is not new and old.numel():
                        old.copy_(new)
                    elif isinstance(new, torch.ScriptObject):
                        Work.unbox(new).wait()


def record(work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    with Tape() as tape:
        result = work()
    return tape.replay, result


def captured_steps(device: str) -> None:
    """Parts and their backward, recorded: the repetition gives what the module gives for other inputs, with other parameters."""
    for index in range(6):
        model, x = random_model(index).to(device), same_input(4 + index % 3, index).to(device)
        handle: Any = interleave(model, way=GROUPS)
        train(handle, model, x)  # communicators are there then
        parts = Step(Way(Moves.GROUPS))
        step = CapturedStep(model, lambda y, of=handle, by=parts: of._run(by, (y,), {})[0], (x,), {}, record)
        for seed in range(3):
            other = same_input(4 + index % 3, 10 + seed).to(device)
            assert_near(train(step, model, other), train(model, model, other))
            with torch.no_grad():
                for each in model.parameters():
                    each.mul_(0.9)
