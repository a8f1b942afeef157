"""torch's kernels that collectives need, loaded before any stream waits: loading one later can hang (see `device.tensors`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossfade.collectives.terms import WHOLE_NUMBERS, Meeting, finish_reduction, reduce_in_order, reduced_dtype
from crossfade.device.driver import HOST
from crossfade.types import CollectiveKind, ReduceOp

__all__ = ["load_reductions"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_reductions(meetings: Sequence[Meeting], device: int) -> None:
    """Runs, and so loads, what reduces, divides and converts tensors of every dtype, as far as these collectives may need it.

    Args:
        meetings: the collectives.
        device: the GPU, or `HOST`, which needs nothing.
    """
    if device == HOST:
        return
    for op in {meeting.op for meeting in meetings if meeting.op is not None}:
        meeting = Meeting("", CollectiveKind.ALLREDUCE, op, 0, ("", ""))
        for dtype in (*_FLOATS, *WHOLE_NUMBERS):
            if op is not ReduceOp.AVG or dtype.is_floating_point:
                rows = torch.ones(2, 8, device=f"cuda:{device}").to(dtype)
                torch.empty_like(rows[0]).copy_(reduce_in_order(meeting, list(rows)))
                rows.copy_(rows.to(reduced_dtype(dtype)))
                finish_reduction(meeting, rows[0])
    torch.cuda.synchronize(device)
