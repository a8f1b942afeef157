"""What the operators give, by torch alone: the product, and torch.distributed's collective in front of it or behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.calls import products as collectives
from crossfade.ops.forward import counts_of

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup


def matmul_reduce_scatter(a: Tensor, b: Tensor, group: PeerGroup, *, bias: Tensor | None = None) -> Tensor:
    """See `crossfade.ops.matmul_reduce_scatter`."""
    product = _product(a, b, bias if group.rank == 0 else None)
    out = product.new_empty(len(product) // group.num_ranks, product.shape[1])
    collectives.reduce_scatter(group, out, product)
    return out


def matmul_all_reduce(a: Tensor, b: Tensor, group: PeerGroup, *, bias: Tensor | None = None) -> Tensor:
    """See `crossfade.ops.matmul_all_reduce`."""
    product = _product(a, b, bias if group.rank == 0 else None)
    collectives.all_reduce(group, product)
    return product.view(*a.shape[:-1], b.shape[1])


def all_gather_matmul(a: Tensor, b: Tensor, group: PeerGroup, *, bias: Tensor | None = None) -> Tensor:
    """See `crossfade.ops.all_gather_matmul`."""
    rows = a.reshape(-1, a.shape[-1])
    gathered = rows.new_empty(group.num_ranks * len(rows), rows.shape[1])
    collectives.all_gather(group, gathered, rows.contiguous())
    return _product(gathered, b, bias)


def matmul_all_to_all(
    a: Tensor, b: Tensor, group: PeerGroup, counts: Sequence[Sequence[int]] | None = None, *, bias: Tensor | None = None
) -> Tensor:
    """See `crossfade.ops.matmul_all_to_all`."""
    product = _product(a, b, bias)
    known = counts_of(group, len(product), counts)
    out = product.new_empty(sum(known.received), product.shape[1])
    collectives.all_to_all(group, out, product, known.received, known.sent)
    return out


def replicated_matmul(a: Tensor, b: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """See `crossfade.ops.operators.replicated_matmul`; without the sum over ranks in the gradient."""
    product: Tensor = torch_or_raise().matmul(a, b)
    return product if bias is None else product + bias


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch_or_raise().mm(a.reshape(-1, a.shape[-1]), b)
    return product if bias is None else product + bias
