"""Gradients of parameters that several stages share, such as tied embeddings: those of all copies are summed.

All copies begin equal. When each step adds the same gradient to all of them, and each has the same optimizer, they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from crossfade.errors import GraphError

__all__ = ["SharedParameter", "sync_shared_gradients"]

SharedParameter = Mapping[int, str]
"""The stages that use a parameter, each with the parameter's name in it."""


def sync_shared_gradients(shared: Sequence[SharedParameter], stages: Sequence[Any]) -> None:
    """Gives each copy of each shared parameter the sum of the gradients of all its copies.

    Sums go in the order of the ranks, so that all copies get the same bits.

    Args:
        shared: all shared parameters, in one order on all ranks.
        stages: the stages of this rank, with which a schedule was made: it has told them which stage is where.

    Raises:
        GraphError: no stage was given.
    """
    if not stages:
        raise GraphError("no stage was given", hint="pass the stages of this rank that the schedule was made with")
    group, rank_of = stages[0].group, stages[0].stage_index_to_group_rank
    modules = {stage.stage_index: stage.submod for stage in stages}
    own_rank = dist.get_rank(group)
    transfers: list[dist.P2POp] = []
    sums: list[tuple[list[nn.Parameter], dict[int, torch.Tensor]]] = []
    for names in shared:
        ranks = sorted({rank_of[index] for index in names})
        if own_rank not in ranks:
            continue
        copies = [modules[index].get_parameter(name) for index, name in sorted(names.items()) if index in modules]
        if not copies[0].requires_grad:
            continue
        parts = {rank: torch.empty_like(copies[0], memory_format=torch.contiguous_format) for rank in ranks}
        parts[own_rank] = _sum_of(copies)
        for rank in ranks:
            if rank != own_rank:
                peer = dist.get_global_rank(group or dist.distributed_c10d._get_default_group(), rank)
                transfers.append(dist.P2POp(dist.isend, parts[own_rank], peer, group))
                transfers.append(dist.P2POp(dist.irecv, parts[rank], peer, group))
        sums.append((copies, parts))
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    for copies, parts in sums:
        total = torch.stack([parts[rank] for rank in sorted(parts)]).sum(0)
        for copy in copies:
            copy.grad = total.clone()


def _sum_of(copies: Sequence[nn.Parameter]) -> torch.Tensor:
    """The sum of the gradients of the copies that one rank has; those that have none count as zero."""
    total = torch.zeros_like(copies[0], memory_format=torch.contiguous_format)
    for copy in copies:
        if copy.grad is not None:
            total += copy.grad
    return total
