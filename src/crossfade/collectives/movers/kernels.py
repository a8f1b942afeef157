"""torch's kernels that collectives need, loaded before any stream waits: loading one later can hang (see `device.tensors`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossfade.collectives.terms import WHOLE_NUMBERS, Terms, finish_reduction, reduce_in_order, reduced_dtype
from crossfade.device.driver import HOST
from crossfade.types import CollectiveKind, ReduceOp

__all__ = ["load_reductions"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_reductions(terms: Sequence[Terms], device: int) -> None:
    """Runs, and so loads, the kernels that reduce, divide and convert tensors of each dtype for these collectives."""
    if device == HOST:
        return
    for op in {each.op for each in terms if each.op is not None}:
        example = Terms("", CollectiveKind.ALLREDUCE, op, 0, ("", ""))
        for dtype in (*_FLOATS, *WHOLE_NUMBERS):
            if op is not ReduceOp.AVG or dtype.is_floating_point:
                rows = torch.ones(2, 8, device=f"cuda:{device}").to(dtype)
                torch.empty_like(rows[0]).copy_(reduce_in_order(example, list(rows)))
                rows.copy_(rows.to(reduced_dtype(dtype)))
                finish_reduction(example, rows[0])
    torch.cuda.synchronize(device)
