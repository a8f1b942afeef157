"""Modules that must not be interleaved, or only in a certain way, with the reason; and gradients that would be wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from crossfade.batches.fsdp import is_fully_sharded, why_not_shared
from crossfade.batches.thread_state import can_exchange_warning_handlers
from crossfade.errors import BatchesError

__all__ = ["guard_backward", "why_one_batch"]


def why_one_batch(module: nn.Module) -> str:
    """Why a module has to be run with the whole batch; nothing if it can be interleaved. All ranks find the same."""
    if not can_exchange_warning_handlers():
        return f"torch {torch.__version__} keeps its handler of warnings where crossfade does not find it"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for name, each in module.named_modules():
        place = f"{type(each).__name__} '{name}'" if name else type(each).__name__
        if isinstance(each, _BatchNorm) and (each.training or each.running_mean is None):
            return f"{place} takes its statistics from the batch: halves would have others"
        if fsdp is not None and isinstance(each, fsdp.FullyShardedDataParallel):
            return f"{place} is sharded by FSDP1, which frees a layer's parameters when the first batch leaves it"
        if is_fully_sharded(each) and (why := why_not_shared(each)):
            return f"{place} is sharded by FSDP2: {why}"
    return ""


def guard_backward(outputs: Iterable[Any], why: str) -> None:
    """Raises in the second backward that comes to one of the outputs: the first one's gradients are summed without the second's."""
    first: list[int] = []

    def look(_: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if not first:
            first.append(task)
        elif task != first[0]:
            raise BatchesError(
                f"{why}: it reduces gradients in the first of several backward calls only, and they would differ between ranks",
                hint="call backward once, on the sum of all batches' losses (InterleavedSteps.backward does)",
            )

    for leaf in pytree.tree_leaves(list(outputs)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            leaf.register_hook(look)  # type: ignore[no-untyped-call,unused-ignore]
