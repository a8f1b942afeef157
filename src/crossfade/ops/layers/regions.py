"""Where a part of a program in which each rank has its share of a tensor begins and ends.

========  ==========================================  ====================================
function  forward                                     gradient
========  ==========================================  ====================================
split     the same on all ranks -> this rank's share  shares -> the same on all ranks
gather    shares -> the same on all ranks             the same on all ranks -> this share
========  ==========================================  ====================================

Behind `gather` all ranks compute the same, so they have the same gradient there, and a share of it is all that a rank needs. Needs
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossfade.ops.gradients.autograd import join_shares, take_share
from crossfade.ops.gradients.dispatch import is_traced, trace_join, trace_share
from crossfade.peers.groups import group_of, ranks_of

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup
    from crossfade.peers.groups import GroupLike


def split(x: Tensor, group: GroupLike = None, dim: int = 0, *, lane: int = 0) -> Tensor:
    """This rank's share of a tensor that all ranks have, such as its part of the sequence.

    Args:
        x: the same on all ranks.
        group: the ranks, as for the operators.
        dim: which dimension is shared out, in equal parts.
        lane: which lane of the group the gradient takes.

    Raises:
        ValueError: the number of ranks does not divide the dimension.
    """
    length, (_, num_ranks) = x.shape[dim], ranks_of(group)
    if length % num_ranks:
        raise ValueError(
            f"dimension {dim} of a tensor of shape {list(x.shape)} cannot be shared out\n"
            f"hint: its length has to be a multiple of the number of ranks, {num_ranks}"
        )
    if is_traced():
        return trace_share(x, group, dim, lane)
    out: Tensor = _SplitRegion.apply(x, group_of(group, x), dim, lane)  # type: ignore[no-untyped-call]
    return out


def gather(x: Tensor, group: GroupLike = None, dim: int = 0, *, lane: int = 0) -> Tensor:
    """All ranks' shares, one behind the other along ``dim``: the same on all ranks. All ranks call it in one order on a lane.

    Args:
        x: of each rank its own, of one shape and type.
        group: the ranks, as for the operators.
        dim: which dimension is shared out.
        lane: which lane of the group.

    Raises:
        ChannelBroken: a rank has died.
    """
    if is_traced():
        return trace_join(x, group, dim, lane)
    out: Tensor = _GatherRegion.apply(x, group_of(group, x), dim, lane)  # type: ignore[no-untyped-call]
    return out


class _SplitRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: PeerGroup, dim: int, lane: int) -> Tensor:
        ctx.where = group, dim, lane
        return take_share(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.where[0], ctx.where[1], lane=ctx.where[2]), None, None, None


class _GatherRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: PeerGroup, dim: int, lane: int) -> Tensor:
        ctx.where = group, dim, lane
        return join_shares(x, group, dim, lane)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return split(grad, ctx.where[0], ctx.where[1], lane=ctx.where[2]), None, None, None
