"""Modules whose batch must not be split, with the reason, and those that reduce gradients."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from crossfade.batches.coroutines.thread_state import can_exchange_warning_handlers
from crossfade.batches.wrappers.fsdp import is_fully_sharded, why_not_shared


def why_one_batch(module: nn.Module) -> str:
    """Why a module has to be run with the whole batch; nothing if it can be interleaved. All ranks find the same."""
    if not can_exchange_warning_handlers():
        return f"torch {torch.__version__} keeps its handler of warnings where crossfade does not find it"
    for name, each in module.named_modules():
        place = place_of(name, each)
        if isinstance(each, _BatchNorm) and (each.training or each.running_mean is None):
            return f"{place} takes its statistics from the batch: halves would have others"
        if _is_sharded_by_fsdp1(each):
            return f"{place} is sharded by FSDP1, which frees a layer's parameters when the first batch leaves it"
        if is_fully_sharded(each) and (why := why_not_shared(each)):
            return f"{place} is sharded by FSDP2: {why}"
    return ""


def place_of(name: str, module: nn.Module) -> str:
    """A module of a model in words: its type, and its name if it has one."""
    return f"{type(module).__name__} '{name}'" if name else type(module).__name__


def reduces_gradients(module: nn.Module) -> bool:
    """Whether its hooks reduce each gradient over the ranks."""
    if isinstance(module, DistributedDataParallel) or is_fully_sharded(module) or _is_sharded_by_fsdp1(module):
        return True
    return any(kind.__module__.endswith("_composable.replicate") for kind in type(module).__mro__)


def _is_sharded_by_fsdp1(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
