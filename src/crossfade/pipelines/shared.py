"""Parameters that several stages share, such as tied embeddings: which stage has which, and the sum of their gradients.

Torch leaves names of tied parameters in stages that do not use them, and copies one name of several. So this is put in order
afterwards: what no graph of a stage uses is removed, names of one parameter in a stage are one object again, the first stage that
uses a parameter has the module's own, and every later one a copy.

All copies begin equal. When each step adds the same gradient to all of them, and each has the same optimizer, they stay equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from crossfade.errors import GraphError

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


def tidy_parameters(module: nn.Module, stages: Sequence[nn.Module]) -> tuple[SharedParameter, ...]:
    """Puts the parameters and buffers of the stages of a module in order, and returns the parameters that several stages use."""
    own = dict(module.named_parameters(remove_duplicate=False))
    users: defaultdict[int, dict[int, list[str]]] = defaultdict(dict)
    for index, stage in enumerate(stages):
        used = set(_used_names(stage))
        for name in [
            *dict(stage.named_parameters(remove_duplicate=False)),
            *dict(stage.named_buffers(remove_duplicate=False)),
        ]:
            if name not in used:
                delattr(*_owner(stage, name))
            elif _name_in_whole(name) in own:
                users[id(own[_name_in_whole(name)])].setdefault(index, []).append(name)
    parameters = {id(parameter): parameter for parameter in own.values()}
    for key, places in users.items():
        original = parameters[key]
        for number, (index, names) in enumerate(sorted(places.items())):
            copy = nn.Parameter(original.detach().clone(), original.requires_grad) if number else original
            for name in names:
                setattr(*_owner(stages[index], name), copy)
    return tuple({index: names[0] for index, names in sorted(p.items())} for p in users.values() if len(p) > 1)


def _used_names(stage: nn.Module) -> Iterator[str]:
    """What the graph of a stage, or of a module in it, takes as an attribute."""
    for scope, module in stage.named_modules(remove_duplicate=False):
        graph = getattr(module, "graph", None)
        for node in graph.nodes if isinstance(graph, fx.Graph) else ():
            if node.op == "get_attr":
                yield f"{scope}.{node.target}" if scope else str(node.target)


def _name_in_whole(name: str) -> str:
    """A name in a stage as the module that was split has it: a module's second call is there as ``layer@1``."""
    return ".".join(part.partition("@")[0] for part in name.split("."))


def _owner(stage: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module in a stage that has a parameter or buffer, and its name there."""
    scope, _, last = name.rpartition(".")
    return stage.get_submodule(scope), last
