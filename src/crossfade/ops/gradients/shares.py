"""One rank's share of a tensor, and all shares joined: what `crossfade.ops.layers.regions` does forward and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.peers import collectives

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup


def take_share(x: Tensor, group: PeerGroup, dim: int) -> Tensor:
    """This rank's, contiguous; W divides the dimension."""
    return x.chunk(group.num_ranks, dim)[group.rank].clone(memory_format=torch_or_raise().contiguous_format)


def join_shares(x: Tensor, group: PeerGroup, dim: int, lane: int) -> Tensor:
    """All ranks', one behind the other along the dimension."""
    shares = collectives.all_gather(x[None], group, lane=lane)
    dim %= x.dim()
    return shares.movedim(0, dim).flatten(dim, dim + 1)
