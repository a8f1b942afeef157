"""Products by torch (cuBLAS on a GPU), on torch's current stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise

if TYPE_CHECKING:
    import torch

    from crossfade.ops.job import Job

__all__ = ["multiply", "multiply_rows"]


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``out`` (M, N) becomes ``a @ b + bias``."""
    torch = torch_or_raise()
    if not out.numel():
        return
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def multiply_rows(job: Job, a: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` becomes the product of these rows of the job; on a CPU in its place in a captured graph."""
    if out.numel():
        job.group.do(lambda: multiply(a, job.b, out, job.bias))
