"""Modules whose batch must not be split, or whose training must not be captured, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from crossfade.batches.fsdp import is_fully_sharded, why_not_shared
from crossfade.batches.held import WITHOUT_CAPTURE
from crossfade.batches.thread_state import can_exchange_warning_handlers
from crossfade.errors import BatchesError


def why_one_batch(module: nn.Module) -> str:
    """Why a module has to be run with the whole batch; nothing if it can be interleaved. All ranks find the same."""
    if not can_exchange_warning_handlers():
        return f"torch {torch.__version__} keeps its handler of warnings where crossfade does not find it"
    for name, each in module.named_modules():
        place = _place_of(name, each)
        if isinstance(each, _BatchNorm) and (each.training or each.running_mean is None):
            return f"{place} takes its statistics from the batch: halves would have others"
        if _is_sharded_by_fsdp1(each):
            return f"{place} is sharded by FSDP1, which frees a layer's parameters when the first batch leaves it"
        if is_fully_sharded(each) and (why := why_not_shared(each)):
            return f"{place} is sharded by FSDP2: {why}"
    return ""


def why_not_captured(module: nn.Module, kinds: set[str], *, trains: bool) -> str:
    """Why no graph can be made of a module's calls, on GPUs; nothing if one can, as far as it is known before.

    ``kinds``: of devices, where the arguments are.
    """
    if "cpu" in kinds:
        return "an argument is on the CPU: a graph would keep its value as a constant"
    if any(not each.is_cuda for own in (module.parameters(), module.buffers()) for each in own):
        return "a parameter or buffer is not on the GPU: a graph would keep its value as a constant"
    if not trains:
        return ""
    for name, each in module.named_modules():
        if reduces_gradients(each):
            return f"{_place_of(name, each)} {_REDUCES}"
    return ""


def _place_of(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} '{name}'" if name else type(module).__name__


_REDUCES = "reduces gradients as they come, which a graph's do not"


def reduces_gradients(module: nn.Module) -> bool:
    """Whether its hooks reduce each gradient over the ranks."""
    if isinstance(module, DistributedDataParallel) or is_fully_sharded(module) or _is_sharded_by_fsdp1(module):
        return True
    return any(kind.__module__.endswith("_composable.replicate") for kind in type(module).__mro__)


def _is_sharded_by_fsdp1(module: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


@contextmanager
def without_reducers() -> Iterator[None]:
    """Raises where a module is called that reduces gradients: what is captured need not be inside the modules that are known."""

    def look(module: nn.Module, _: object) -> None:
        if reduces_gradients(module):
            raise BatchesError(f"{type(module).__name__} {_REDUCES}", hint=WITHOUT_CAPTURE)

    hook = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        hook.remove()
