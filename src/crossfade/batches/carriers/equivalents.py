"""Which collective of `crossfade.peers` does what a call of torch.distributed asks for, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from crossfade.peers.collectives import SUMMABLE, all_gather, all_reduce, all_to_all, reduce_scatter

Copied = tuple[Callable[..., Any], torch.Tensor, torch.Tensor]
"""A collective of `crossfade.peers`, what it reads and what it writes."""


def of_method(name: str, args: tuple[Any, ...]) -> Copied | None:
    """The equivalent of a process group's method; None if there is none."""
    match name, args:
        case "allreduce", ([tensor], opts) if opts.reduceOp == dist.ReduceOp.SUM:
            return _fitting(all_reduce, tensor, tensor)
        case (("all_gather_single" | "_allgather_base"), (out, source, _)):
            return _flat(_fitting(all_gather, source, out))
        case (("reduce_scatter_single" | "_reduce_scatter_base"), (out, source, opts)) if (
            opts.reduceOp == dist.ReduceOp.SUM
        ):
            return _flat(_fitting(reduce_scatter, source, out))
        case (("all_to_all_single" | "alltoall_base"), (out, source, [], [], _)):  # sizes may differ on another rank
            return _flat(_fitting(all_to_all, source, out))
    return None


def _flat(copied: Copied | None) -> Copied | None:
    """The same in one dimension: an output of torch's methods may have other dimensions than that of `crossfade.peers`."""
    return None if copied is None else (copied[0], copied[1].view(-1), copied[2].view(-1))


def of_packet(name: str, args: tuple[Any, ...]) -> Copied | None:
    """The same of a functional collective, whose output is made here."""
    source = args[0]
    if not isinstance(source, torch.Tensor) or (source.requires_grad and torch.is_grad_enabled()) or not source.dim():
        return None
    match name.partition(".")[2], args[1:]:
        case "all_reduce", ("sum", _):
            return _fitting(all_reduce, source, torch.empty_like(source))
        case "all_gather_into_tensor", (num_ranks, _):
            return _fitting(all_gather, source, source.new_empty(source.shape[0] * num_ranks, *source.shape[1:]))
        case "reduce_scatter_tensor", ("sum", num_ranks, _):
            return _fitting(reduce_scatter, source, source.new_empty(source.shape[0] // num_ranks, *source.shape[1:]))
    return None


def _fitting(act: Callable[..., Any], source: torch.Tensor, out: torch.Tensor) -> Copied | None:
    if not _is_plain(source) or (out is not source and not _is_plain(out)):
        return None
    if act in (all_reduce, reduce_scatter) and not _is_summable(source.dtype):
        return None
    return act, _detached(source), _detached(out)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is elements one behind the other in memory of a GPU or of the host."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    return (tensor.is_cuda or tensor.is_cpu) and tensor.is_contiguous() and tensor.numel() > 0


@cache
def _is_summable(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in SUMMABLE
